#include "pending.h"

#include <string.h>

#include <algorithm>

#include "../xxh3_dispatch.h"
#include "cuda_read.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// Hashing less than this is over before another thread could be woken.
constexpr uint64_t kReleaseGilBytes = 256 * 1024;

// Copies the content of a host tensor into its key, and seals the key unless that takes long. Since the view was made,
// no other thread has run Python code. What is hashed is the copy.
void read_contiguous(const uint8_t* data, KeyObject* key) {
  if (key->nbytes >= kReleaseGilBytes) {
    memcpy(key->content(), data, key->nbytes);
  } else {
    seal(key, xxh3::copy_and_hash(key->content(), data, key->nbytes));
  }
}

void read_view(const TensorView& view, KeyObject* key) {
  if (view.contiguous) {
    read_contiguous(view.data, key);
  } else {
    copy_content(view, key->content());
    if (view.nbytes < kReleaseGilBytes) seal(key);
  }
}

// Does so with what a host copy came back as, which may be anything.
bool read_host_copy(PyObject* copy, KeyObject* key, uint64_t max_bytes, Reason& reason) {
  TensorView view;
  if (!view_tensor(copy, max_bytes, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!confirm_tensor(copy, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!view_tensor(copy, max_bytes, view, reason) || !confirm_width(copy, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (view.on_host() && describes(key, view)) {
    read_view(view, key);
  } else {
    reason = Reason::kChanged;
  }
  return true;
}

}  // namespace

size_t PendingKeys::defer(PyObject* tensor, PyObject* argument) {
  if (items_.empty()) items_.reserve(4);  // most calls have two
  items_.push_back({Ref::borrow(tensor), Ref(), argument, nullptr});
  return items_.size() - 1;
}

PyObject* PendingKeys::add(PyObject* tensor, const TensorView& view, PyObject* argument) {
  Ref key = Ref::steal(reinterpret_cast<PyObject*>(new_key(view, era_)));
  if (!key) return nullptr;
  items_.push_back({Ref::borrow(tensor), Ref::borrow(key.get()), argument, nullptr});
  return key.release();
}

bool PendingKeys::look_until(size_t end, uint64_t max_bytes, Reason& reason) {
  reason = Reason::kNone;
  for (size_t i = 0; i < end; ++i) {
    PendingKey& item = items_[i];
    if (item.key) continue;
    refused_ = &item;
    TensorView view;
    if (!view_tensor(item.tensor.get(), max_bytes, view, reason)) return false;
    if (reason != Reason::kNone) return true;
    item.key = Ref::steal(reinterpret_cast<PyObject*>(new_key(view, era_)));
    if (!item.key) return false;
  }
  return true;
}

bool PendingKeys::confirm(uint64_t max_bytes, Reason& reason) {
  for (size_t i = 0; i < items_.size(); ++i) {
    PendingKey& item = items_[i];
    if (!confirm_tensor(item.tensor.get(), reason)) return false;
    if (reason == Reason::kNone) continue;
    // What the table says of this tensor and of those before it comes first.
    const Reason found = reason;
    if (!look_until(i + 1, max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
    if (item.object()->nbytes == 0) continue;
    refused_ = &item;
    reason = found;
    return true;
  }
  return true;
}

bool PendingKeys::look_again(uint64_t max_bytes, Reason& reason) {
  for (PendingKey& item : items_) {
    refused_ = &item;
    TensorView view;
    PyObject* tensor = item.tensor.get();
    if (!view_tensor(tensor, max_bytes, view, reason) || !confirm_width(tensor, view, reason)) return false;
    if (reason != Reason::kNone) return true;
    if (!item.key) {
      item.key = Ref::steal(reinterpret_cast<PyObject*>(new_key(view, era_)));
      if (!item.key) return false;
    } else if (!describes(item.object(), view) || !on_device_of(item.object(), view)) {
      reason = Reason::kChanged;
      return true;
    }
    item.object()->source = reinterpret_cast<uintptr_t>(view.data);
    item.data = view.contiguous ? view.data : nullptr;
    on_device_ |= !view.on_host();
  }
  return true;
}

bool PendingKeys::read_host(uint64_t max_bytes, Reason& reason) {
  // First all of them: no byte is read of a call that bypasses.
  if (!look_again(max_bytes, reason)) return false;
  if (reason != Reason::kNone) return true;
  for (PendingKey& item : items_) {
    KeyObject* key = item.object();
    if (key->device.type != dlpack::kCpu) continue;
    if (item.data != nullptr || key->nbytes == 0) {
      read_contiguous(item.data, key);
      continue;
    }
    TensorView view;  // as it was a moment ago
    if (!view_tensor(item.tensor.get(), max_bytes, view, reason)) return false;
    if (reason != Reason::kNone) return true;
    read_view(view, key);
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
    if (!copy || !read_host_copy(copy.get(), waiting[i]->object(), max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  return true;
}

bool PendingKeys::fill(uint64_t max_bytes, PyObject* to_host, Reason& reason) {
  reason = Reason::kNone;
  if (items_.empty()) return true;
  {
    const WithoutModes without_modes;
    if (PyErr_Occurred() != nullptr || !confirm(max_bytes, reason)) return false;
    if (reason == Reason::kNone && !read_host(max_bytes, reason)) return false;
  }
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
