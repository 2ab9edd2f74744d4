#include "pending.h"

#include <algorithm>

#include "cuda_read.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// Hashing less than this is over before another thread could be woken.
constexpr uint64_t kReleaseGilBytes = 256 * 1024;

// Copies the content of `tensor` into `key`, if the tensor is on the host and still what it was.
bool read_into(PyObject* tensor, KeyObject* key, uint64_t max_bytes, Reason& reason) {
  if (!is_exact_tensor(tensor)) {
    reason = refusal_of(tensor);
    return true;
  }
  TensorView view;
  if (!view_tensor(tensor, max_bytes, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!view.on_host() || !describes(key, view)) {
    reason = Reason::kChanged;
    return true;
  }
  // Since the view was made, no other thread has run. What is hashed later is this copy.
  copy_content(view, key->content());
  return true;
}

}  // namespace

PyObject* PendingKeys::add(PyObject* tensor, const TensorView& view) {
  Ref key = Ref::steal(reinterpret_cast<PyObject*>(new_key(view)));
  if (!key) return nullptr;
  items_.push_back({Ref::borrow(tensor), Ref::borrow(key.get()), false});
  on_device_ |= !view.on_host();
  return key.release();
}

bool PendingKeys::read_host(uint64_t max_bytes, Reason& reason) {
  for (const PendingKey& item : items_) {
    KeyObject* key = item.object();
    if (key->device.type != dlpack::kCpu) continue;
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
  const auto is_filled = [](const PendingKey* item) { return item->filled; };
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_filled), waiting.end());
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
  for (size_t i = 0; i < waiting.size(); ++i) {
    const Ref copy = Ref::steal(PySequence_GetItem(copies.get(), static_cast<Py_ssize_t>(i)));
    TensorView checked;  // a copy may be anything
    if (!copy || !read_tensor(copy.get(), max_bytes, checked, reason)) return false;
    if (reason != Reason::kNone) return true;
    if (!read_into(copy.get(), waiting[i]->object(), max_bytes, reason)) return false;
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
  for (const PendingKey& item : items_) total += item.filled ? 0 : item.object()->nbytes;
  PyThreadState* released = total >= kReleaseGilBytes ? PyEval_SaveThread() : nullptr;
  for (const PendingKey& item : items_) {
    KeyObject* key = item.object();
    if (item.filled) {
      seal(key, key->digest);
    } else {
      seal(key);
    }
  }
  if (released != nullptr) PyEval_RestoreThread(released);
  return true;
}

}  // namespace otk::py
