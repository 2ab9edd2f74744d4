#include "tensor_reader.h"

#include <algorithm>
#include <memory>

#include "../hash/xxh3_dispatch.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// Hashing less than this is over before another thread could be woken.
constexpr uint64_t kReleaseGilBytes = 256 * 1024;

// Copies the content of a host tensor into its key, and seals the key unless hashing takes long. Since the view was
// made, no other thread has run Python code. What is hashed is the copy.
void read_view(const TensorView& view, KeyObject* key) {
  if (view.nbytes >= kReleaseGilBytes) {
    copy_content(view, key->content());
  } else if (view.contiguous) {
    seal(key, xxh3::copy_and_hash(key->content(), view.data, view.nbytes));
  } else {
    copy_content(view, key->content());
    seal(key, xxh3::hash(key->content(), key->nbytes));
  }
}

// Does so with what a host copy came back as, which may be anything.
bool read_host_copy(PyObject* copy, KeyObject* key, uint64_t max_bytes, Reason& reason) {
  TensorView view;
  if (!view_tensor(copy, max_bytes, view, reason)) return false;
  if (reason == Reason::kNone && !(view.on_host() && describes(key, view))) reason = Reason::kChanged;
  if (reason == Reason::kNone) read_view(view, key);
  return true;
}

}  // namespace

void TensorReader::add(PyObject* tensor, PyObject* argument) {
  if (items_.empty()) items_.reserve(4);  // most calls have two
  items_.push_back({Ref::borrow(tensor), Ref(), argument});
}

PyObject* TensorReader::key_of(PyObject* tensor) {
  for (size_t tried = 0; tried < items_.size(); ++tried) {
    const Item& item = items_[next_];
    next_ = (next_ + 1) % items_.size();
    if (item.tensor.get() == tensor) return item.key.get();
  }
  return nullptr;
}

bool TensorReader::read(uint64_t max_bytes, PyObject* to_host, CudaUse use, Reason& reason) {
  reason = Reason::kNone;
  if (items_.empty()) return true;
  if (!find_torch()) return false;
  const WithoutModes without_modes;
  if (PyErr_Occurred() != nullptr) return false;
  const std::unique_ptr<TensorView[]> views(new TensorView[items_.size()]);
  for (refused_ = 0; refused_ < items_.size(); ++refused_) {
    if (!view_tensor(items_[refused_].tensor.get(), max_bytes, views[refused_], reason)) return false;
    if (reason != Reason::kNone) return true;
  }
  // Until here no byte was read; from the first description on, no Python code ran that could free a storage.
  bool on_device = false;
  for (size_t i = 0; i < items_.size(); ++i) {
    KeyObject* key = new_key(views[i]);
    if (key == nullptr) return false;
    items_[i].key = Ref::steal(reinterpret_cast<PyObject*>(key));
    if (views[i].on_host() || views[i].nbytes == 0) {
      read_view(views[i], key);
    } else {
      on_device = true;
    }
  }
  if (on_device && !read_devices(views.get(), max_bytes, to_host, use, reason)) return false;
  if (reason == Reason::kNone) hash_large();
  return true;
}

bool TensorReader::read_devices(const TensorView* views, uint64_t max_bytes, PyObject* to_host, CudaUse use,
                                Reason& reason) {
  std::vector<DeviceTensor> tensors;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (views[i].on_host() || views[i].nbytes == 0) continue;
    if (tensors.empty()) refused_ = i;
    tensors.push_back({items_[i].tensor.get(), items_[i].object(), {}});
    if (views[i].device.type == kCudaDevice) describe_cuda(views[i], tensors.back().described);
  }
  if (!read_cuda(tensors, max_bytes, use, reason)) return false;
  if (reason != Reason::kNone) return true;
  const auto is_sealed = [](const DeviceTensor& item) { return item.key->sealed(); };
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), is_sealed), tensors.end());
  return tensors.empty() || copy_to_host(tensors, max_bytes, to_host, reason);
}

bool TensorReader::copy_to_host(const std::vector<DeviceTensor>& tensors, uint64_t max_bytes, PyObject* to_host,
                                Reason& reason) {
  const Ref list = Ref::steal(PyList_New(0));
  if (!list) return false;
  for (const DeviceTensor& item : tensors) {
    if (PyList_Append(list.get(), item.tensor) < 0) return false;
  }
  const Ref copies = Ref::steal(PyObject_CallFunctionObjArgs(to_host, list.get(), nullptr));
  if (!copies) return false;
  if (copies.get() == Py_None) {
    reason = Reason::kGraphCapture;
    return true;
  }
  for (size_t i = 0; i < tensors.size() && reason == Reason::kNone; ++i) {
    const Ref copy = Ref::steal(PySequence_GetItem(copies.get(), static_cast<Py_ssize_t>(i)));
    if (!copy || !read_host_copy(copy.get(), tensors[i].key, max_bytes, reason)) return false;
  }
  return true;
}

// Nobody else has the keys yet, so they can be hashed without the GIL.
void TensorReader::hash_large() const {
  const auto is_waiting = [](const Item& item) { return !item.object()->sealed(); };
  if (std::none_of(items_.begin(), items_.end(), is_waiting)) return;
  PyThreadState* released = PyEval_SaveThread();
  for (const Item& item : items_) {
    KeyObject* key = item.object();
    if (is_waiting(item)) seal(key, xxh3::hash(key->content(), key->nbytes));
  }
  PyEval_RestoreThread(released);
}

}  // namespace otk::py
