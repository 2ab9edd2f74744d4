#include "cuda_read.h"

#include <string.h>

#include <algorithm>
#include <set>

#include "torch_tensor.h"

#if defined(OTK_CUDA_BUILD)
#include "../cuda/unit.h"
#endif

namespace otk::py {

thread_local bool cuda_unit_wanted = true;

namespace {

// Another value puts the test device in CUDA's place, on machines without a GPU.
#if !defined(OTK_CUDA_DEVICE)
#define OTK_CUDA_DEVICE dlpack::kCuda
#endif

// Has Python log, once per text, why CUDA tensors are copied to the host by torch.
bool note_host_copy(const char* why) {
  const Ref module = Ref::steal(PyImport_ImportModule("omni_tensor_key.host_copy"));
  const Ref done = module ? Ref::steal(PyObject_CallMethod(module.get(), "note_host_copy", "s", why)) : Ref();
  return static_cast<bool>(done);
}

}  // namespace

#if !defined(OTK_CUDA_BUILD)

const char* const cuda_build = nullptr;

bool cuda_unit_used() { return cuda_unit_wanted; }

bool read_cuda(const std::vector<PendingKey*>& items, uint64_t, Reason&) {
  const auto is_cuda = [](const PendingKey* item) { return item->object()->device.type == OTK_CUDA_DEVICE; };
  return std::none_of(items.begin(), items.end(), is_cuda) ||
         note_host_copy("omni_tensor_key was built without its CUDA unit (no nvcc, or OMNI_TENSOR_KEY_CUDA=0).");
}

#else

const char* const cuda_build = OTK_CUDA_BUILD;

namespace {

// The unit's first reading on a device is compared with torch's, by Python code that comes back to this file: a kernel
// that reads wrongly would otherwise show in nothing but wrong hits. Guarded by the GIL.
std::set<int32_t> being_compared;
std::set<int32_t> compared;
bool is_wrong = false;  // on some device; the unit is not used again
thread_local bool comparing = false;

// Whether what the unit has read on the tensor's device can be used. False with an error set.
bool ask_trust(const PendingKey& item, bool& trusted) {
  const int32_t device = item.object()->device.id;
  trusted = comparing || compared.count(device) > 0;
  if (trusted || !being_compared.insert(device).second) return true;
  comparing = true;
  const Ref module = Ref::steal(PyImport_ImportModule("omni_tensor_key.cuda_check"));
  PyObject* tensor = item.tensor.get();
  const Ref equal = module ? Ref::steal(PyObject_CallMethod(module.get(), "compare_with_torch", "O", tensor)) : Ref();
  comparing = false;
  being_compared.erase(device);
  trusted = equal.get() == Py_True;
  if (trusted) compared.insert(device);
  if (equal.get() == Py_False) is_wrong = true;
  return static_cast<bool>(equal);
}

// Whether all of them can; the keys are left for torch to fill where not.
bool keep_trusted(const std::vector<PendingKey*>& items) {
  bool trusted = true;
  for (size_t i = 0; trusted && i < items.size(); ++i) {
    if (!ask_trust(*items[i], trusted)) return false;
  }
  if (trusted) return true;
  for (PendingKey* item : items) unseal(item->object());
  return true;
}

// Tensors of all devices, those of one device together.
struct Tensors {
  std::vector<PendingKey*> items;
  std::vector<OtkCudaTensor> described;
  std::vector<OtkCudaGroup> groups;
};

bool describe(PendingKey& item, uint64_t max_bytes, OtkCudaTensor& out, Reason& reason) {
  KeyObject* key = item.object();
  out.nbytes = key->nbytes;
  out.item_size = key->dtype.bits / 8;
  out.ndim = 1;
  out.shape[0] = static_cast<int64_t>(key->nbytes / out.item_size);
  out.strides[0] = 1;
  TensorView view;
  if (!view_tensor(item.tensor.get(), max_bytes, view, reason)) return false;
  if (reason != Reason::kNone) return true;
  if (!describes(key, view) || !on_device_of(key, view)) {
    reason = Reason::kChanged;
    return true;
  }
  key->source = reinterpret_cast<uintptr_t>(view.data);
  out.data = view.data;
  if (view.contiguous) return true;
  const Strided loop = collapse(view);
  out.ndim = static_cast<uint32_t>(loop.ndim);  // too many: otk_cuda_readable() says so
  for (int32_t i = 0; i < loop.ndim && i < OTK_CUDA_MAX_DIMS; ++i) {
    out.shape[i] = loop.shape[i];
    out.strides[i] = loop.strides[i];
  }
  return true;
}

bool describe_all(const std::vector<PendingKey*>& items, uint64_t max_bytes, Tensors& tensors, Reason& reason) {
  std::vector<PendingKey*> on_cuda;
  for (PendingKey* item : items) {
    if (item->object()->device.type == OTK_CUDA_DEVICE) on_cuda.push_back(item);
  }
  std::stable_sort(on_cuda.begin(), on_cuda.end(), [](const PendingKey* a, const PendingKey* b) {
    return a->object()->device.id < b->object()->device.id;
  });
  tensors.described.reserve(on_cuda.size());  // the groups point into it
  for (PendingKey* item : on_cuda) {
    OtkCudaTensor described;
    if (!describe(*item, max_bytes, described, reason)) return false;
    if (reason != Reason::kNone) return true;
    if (!otk_cuda_readable(&described)) continue;
    const int32_t device = item->object()->device.id;
    if (tensors.groups.empty() || tensors.groups.back().device != device) {
      void* stream = nullptr;
      bool known;
      if (!current_cuda_stream(device, &stream, known)) return false;
      if (!known) return note_host_copy("torch's DLPack table has no function that tells the current stream.");
      tensors.groups.push_back({device, stream, tensors.described.data() + tensors.described.size(), 0});
    }
    tensors.items.push_back(item);
    tensors.described.push_back(described);
    ++tensors.groups.back().count;
  }
  return true;
}

// Waits without the GIL: the work before ours on the stream may take long. The launch was made with it, so that no
// Python code could free the memory in between; what is launched, every allocator waits for.
OtkCudaStatus wait_and_copy(OtkCudaRead* read, const Tensors& tensors, OtkCudaText* text) {
  PyThreadState* released = PyEval_SaveThread();
  const OtkCudaStatus status = otk_cuda_wait(read, text);
  for (size_t i = 0; status == OTK_CUDA_OK && i < tensors.items.size(); ++i) {
    KeyObject* key = tensors.items[i]->object();
    const OtkCudaResult result = otk_cuda_result(read, i);
    memcpy(key->content(), result.content, key->nbytes);
    seal(key, {result.digest_low, result.digest_high});
  }
  otk_cuda_release(read);
  PyEval_RestoreThread(released);
  return status;
}

}  // namespace

bool cuda_unit_used() { return cuda_unit_wanted && !is_wrong; }

bool read_cuda(const std::vector<PendingKey*>& items, uint64_t max_bytes, Reason& reason) {
  if (!cuda_unit_used()) return true;
  Tensors tensors;
  if (!describe_all(items, max_bytes, tensors, reason)) return false;
  if (reason != Reason::kNone || tensors.items.empty()) return true;
  OtkCudaRead* read;
  OtkCudaText text;
  OtkCudaStatus status = otk_cuda_launch(tensors.groups.data(), tensors.groups.size(), &read, &text);
  if (status == OTK_CUDA_OK) status = wait_and_copy(read, tensors, &text);
  switch (status) {
    case OTK_CUDA_OK:
      return keep_trusted(tensors.items);
    case OTK_CUDA_CAPTURING:
      reason = Reason::kGraphCapture;
      return true;
    case OTK_CUDA_UNAVAILABLE:
      return note_host_copy(text.text);
    default:
      PyErr_SetString(PyExc_RuntimeError, text.text);
      return false;
  }
}

#endif  // OTK_CUDA_BUILD

}  // namespace otk::py
