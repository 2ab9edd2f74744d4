#include "pending.h"

#include <algorithm>

#include "../xxh3_dispatch.h"
#include "cuda_read.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// Hashing less than this is over before another thread could be woken.
constexpr uint64_t kReleaseGilBytes = 256 * 1024;

// Copies the content of `tensor` into `key`, if the tensor is on the host and still what it was, and seals the key
// unless that takes long.
bool read_into(PyObject* tensor, KeyObject* key, uint64_t max_bytes, Reason& reason) {
  TensorView view;
  if (!view_tensor(tensor, max_bytes, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!view.on_host() || !describes(key, view)) {
    reason = Reason::kChanged;
    return true;
  }
  // Since the view was made, no other thread has run Python code. What is hashed is the copy.
  if (view.nbytes >= kReleaseGilBytes || !view.contiguous) {
    copy_content(view, key->content());
    if (view.nbytes < kReleaseGilBytes) seal(key);
  } else {
    seal(key, xxh3::copy_and_hash(key->content(), view.data, view.nbytes));
  }
  return true;
}

// The same for what a host copy came back as, which may be anything.
bool read_copy(PyObject* copy, KeyObject* key, uint64_t max_bytes, Reason& reason) {
  TensorView view;
  if (!view_tensor(copy, max_bytes, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (view.nbytes > 0 && !confirm_tensor(copy, view.dtype, reason)) return false;
  return reason != Reason::kNone || read_into(copy, key, max_bytes, reason);
}

}  // namespace

PyObject* PendingKeys::add(PyObject* tensor, const TensorView& view, PyObject* argument) {
  Ref key = Ref::steal(reinterpret_cast<PyObject*>(new_key(view)));
  if (!key) return nullptr;
  if (items_.empty()) items_.reserve(4);  // most calls have two
  items_.push_back({Ref::borrow(tensor), Ref::borrow(key.get()), argument});
  on_device_ |= !view.on_host();
  return key.release();
}

bool PendingKeys::confirm(Reason& reason) {
  const WithoutModes without_modes;
  if (PyErr_Occurred() != nullptr) return false;
  for (const PendingKey& item : items_) {
    const KeyObject* key = item.object();
    if (key->nbytes == 0) continue;
    refused_ = &item;
    if (!confirm_tensor(item.tensor.get(), key->dtype, reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  return true;
}

bool PendingKeys::read_host(uint64_t max_bytes, Reason& reason) {
  for (const PendingKey& item : items_) {
    KeyObject* key = item.object();
    if (key->device.type != dlpack::kCpu) continue;
    refused_ = &item;
    if (!read_into(item.tensor.get(), key, max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  return true;
}

bool PendingKeys::read_devices(uint64_t max_bytes, PyObject* to_host, Reason& reason) {
  std::vector<PendingKey*> waiting;
  for (PendingKey& item : items_) {
    const KeyObject* key = item.object();
    if (key->device.type != dlpack::kCpu && key->nbytes > 0) waiting.push_back(&item);
  }
  if (!read_cuda(waiting, max_bytes, reason)) return false;
  if (reason != Reason::kNone) return true;

  const Ref tensors = Ref::steal(PyList_New(0));
  if (!tensors) return false;
  const auto is_sealed = [](const PendingKey* item) { return item->object()->sealed; };
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_sealed), waiting.end());
  for (const PendingKey* item : waiting) {
    if (PyList_Append(tensors.get(), item->tensor.get()) < 0) return false;
  }
  if (waiting.empty()) return true;
  const Ref copies = Ref::steal(PyObject_CallFunctionObjArgs(to_host, tensors.get(), nullptr));
  if (!copies) return false;
  if (copies.get() == Py_None) {
    reason = Reason::kGraphCapture;
    return true;
  }
  const WithoutModes without_modes;
  if (PyErr_Occurred() != nullptr) return false;
  for (size_t i = 0; i < waiting.size(); ++i) {
    refused_ = waiting[i];
    const Ref copy = Ref::steal(PySequence_GetItem(copies.get(), static_cast<Py_ssize_t>(i)));
    if (!copy || !read_copy(copy.get(), waiting[i]->object(), max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  return true;
}

bool PendingKeys::fill(uint64_t max_bytes, PyObject* to_host, Reason& reason) {
  reason = Reason::kNone;
  if (!confirm(reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!read_host(max_bytes, reason)) return false;
  if (reason != Reason::kNone) return true;
  refused_ = nullptr;
  if (on_device_ && !read_devices(max_bytes, to_host, reason)) return false;
  if (reason != Reason::kNone) return true;

  uint64_t total = 0;
  for (const PendingKey& item : items_) total += item.object()->sealed ? 0 : item.object()->nbytes;
  PyThreadState* released = total > 0 ? PyEval_SaveThread() : nullptr;
  for (const PendingKey& item : items_) {
    if (!item.object()->sealed) seal(item.object());
  }
  if (released != nullptr) PyEval_RestoreThread(released);
  return true;
}

}  // namespace otk::py
