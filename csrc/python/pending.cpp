#include "pending.h"

#include <string.h>

#include "torch_tensor.h"

namespace otk::py {
namespace {

// Hashing less than this is over before another thread could be woken.
constexpr uint64_t kReleaseGilBytes = 256 * 1024;

// Copies the content of `tensor` into `key`, if the tensor is on the host and still what it was.
bool read_into(PyObject* tensor, KeyObject* key, uint64_t max_bytes, Reason& reason) {
  TensorView view;
  if (!read_tensor(tensor, max_bytes, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!view.on_host() || !describes(key, view)) {
    reason = Reason::kChanged;
    return true;
  }
  // Under the GIL: the storage cannot be resized by Python code while it is read. What is hashed later is this copy.
  copy_content(view, key->content());
  return true;
}

}  // namespace

PyObject* PendingKeys::add(PyObject* tensor, const TensorView& view) {
  Ref key = Ref::steal(reinterpret_cast<PyObject*>(new_key(view)));
  if (!key) return nullptr;
  items_.push_back({Ref::borrow(tensor), Ref::borrow(key.get()), view.contiguous});
  on_device_ |= !view.on_host();
  return key.release();
}

bool PendingKeys::read_host(uint64_t max_bytes, Reason& reason) {
  for (const Item& item : items_) {
    KeyObject* key = item.key_object();
    if (key->device.type != dlpack::kCpu) continue;
    if (trusted_ && item.contiguous) {
      // No code but ours has run since the tensor was looked at, so it still starts at its source.
      if (key->nbytes > 0) memcpy(key->content(), reinterpret_cast<const void*>(key->source), key->nbytes);
      continue;
    }
    if (!read_into(item.tensor.get(), key, max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  return true;
}

bool PendingKeys::read_devices(uint64_t max_bytes, PyObject* to_host, Reason& reason) {
  std::vector<KeyObject*> keys;
  const Ref tensors = Ref::steal(PyList_New(0));
  if (!tensors) return false;
  for (const Item& item : items_) {
    KeyObject* key = item.key_object();
    if (key->device.type == dlpack::kCpu || key->nbytes == 0) continue;
    keys.push_back(key);
    if (PyList_Append(tensors.get(), item.tensor.get()) < 0) return false;
  }
  if (keys.empty()) return true;
  const Ref copies = Ref::steal(PyObject_CallFunctionObjArgs(to_host, tensors.get(), nullptr));
  if (!copies) return false;
  if (copies.get() == Py_None) {
    reason = Reason::kGraphCapture;
    return true;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const Ref copy = Ref::steal(PySequence_GetItem(copies.get(), static_cast<Py_ssize_t>(i)));
    if (!copy || !read_into(copy.get(), keys[i], max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  return true;
}

bool PendingKeys::fill(uint64_t max_bytes, PyObject* to_host, Reason& reason) {
  reason = Reason::kNone;
  if (!read_host(max_bytes, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (on_device_ && !read_devices(max_bytes, to_host, reason)) return false;
  if (reason != Reason::kNone) return true;

  uint64_t total = 0;
  for (const Item& item : items_) total += item.key_object()->nbytes;
  PyThreadState* released = total >= kReleaseGilBytes ? PyEval_SaveThread() : nullptr;
  for (const Item& item : items_) seal(item.key_object());
  if (released != nullptr) PyEval_RestoreThread(released);
  return true;
}

}  // namespace otk::py
