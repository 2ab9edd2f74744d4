#include "cuda_read.h"

#include <string.h>

#include <algorithm>
#include <map>

#include "torch_tensor.h"

namespace otk::py {
namespace {

PyObject* check_function = nullptr;
PyObject* note_function = nullptr;

// Leaves the tensors to torch. Why is logged, once per text.
bool leave_to_torch(CudaUse use, const char* why) {
  if (use == CudaUse::kAlways) {
    PyErr_Format(PyExc_NotImplementedError, "the CUDA unit cannot read these tensors: %s", why);
    return false;
  }
  return note_function == nullptr || Ref::steal(PyObject_CallFunction(note_function, "s", why));
}

}  // namespace

void set_cuda_functions(PyObject* check_cuda_unit, PyObject* note_host_copy) {
  check_function = check_cuda_unit;
  note_function = note_host_copy;
}

void describe_cuda(const TensorView& view, OtkCudaTensor& described) {
  described.data = view.data;
  described.nbytes = view.nbytes;
  described.item_size = view.item_size;
  described.ndim = 1;
  described.shape[0] = static_cast<int64_t>(view.nbytes / view.item_size);
  described.strides[0] = 1;
  if (view.contiguous) return;
  const Strided loop = collapse(view);
  described.ndim = static_cast<uint32_t>(loop.ndim);
  for (int32_t i = 0; i < loop.ndim && i < OTK_CUDA_MAX_DIMS; ++i) {
    described.shape[i] = loop.shape[i];
    described.strides[i] = loop.strides[i];
  }
}

#if !defined(OTK_CUDA_BUILD)

const char* const cuda_build = nullptr;

bool read_cuda(std::vector<DeviceTensor>& tensors, uint64_t, CudaUse use, Reason&) {
  if (use == CudaUse::kNever || tensors[0].key->device.type != kCudaDevice) return true;
  return leave_to_torch(use, "omni_tensor_key was built without its CUDA unit (no nvcc, or OMNI_TENSOR_KEY_CUDA=0).");
}

#else

const char* const cuda_build = OTK_CUDA_BUILD;

namespace {

// What is known of the unit on each device: its first use there is compared with torch's copies, since a kernel that
// reads wrongly would show in nothing but wrong hits. Guarded by the GIL.
enum class Trust { kUnknown, kChecking, kRight };
std::map<int32_t, Trust> trust;
bool is_wrong = false;  // on some device; the unit is not used again

OtkCudaStatus prepare(std::vector<DeviceTensor>& items, OtkCudaText& text) {
  uint64_t nbytes = 0;
  for (const DeviceTensor& item : items) nbytes += item.key->nbytes;
  const int32_t device = items[0].key->device.id;
  PyThreadState* released = PyEval_SaveThread();
  const OtkCudaStatus status = otk_cuda_prepare(device, items.size(), nbytes, &text);
  PyEval_RestoreThread(released);
  return status;
}

// Compares the unit's first reading on a device with torch's. OTK_CUDA_UNPREPARED where it is right: Python code has
// run, so the tensors must be described anew.
OtkCudaStatus check_first_use(std::vector<DeviceTensor>& items, OtkCudaText& text) {
  const int32_t device = items[0].key->device.id;
  trust[device] = Trust::kChecking;
  OtkCudaScope scope;
  OtkCudaStatus status = prepare(items, text);
  if (status == OTK_CUDA_OK) {
    // torch's copies must not end a capture on another thread either.
    status = otk_cuda_enter(device, &scope, &text);
    Ref right;
    if (status == OTK_CUDA_OK)
      right = Ref::steal(PyObject_CallFunctionObjArgs(check_function, items[0].tensor, nullptr));
    otk_cuda_leave(&scope);
    is_wrong |= right.get() == Py_False;
    if (right.get() == Py_True) {
      trust[device] = Trust::kRight;
      return OTK_CUDA_UNPREPARED;
    }
  }
  trust[device] = Trust::kUnknown;
  return status;
}

// Describes tensors anew, after other code has run.
bool describe_again(std::vector<DeviceTensor>& items, uint64_t max_bytes, Reason& reason) {
  for (DeviceTensor& item : items) {
    TensorView view;
    if (!view_tensor(item.tensor, max_bytes, view, reason)) return false;
    if (reason == Reason::kNone && !(describes(item.key, view) && on_device_of(item.key, view))) {
      reason = Reason::kChanged;
    }
    if (reason != Reason::kNone) return true;
    describe_cuda(view, item.described);
  }
  return true;
}

// Launches with the GIL, so that no Python code can free the tensors' memory before: what is launched, every allocator
// waits for. Waits without it: the work before ours on the stream may take long.
OtkCudaStatus launch_and_wait(std::vector<DeviceTensor>& items, void* stream, OtkCudaText& text) {
  std::vector<OtkCudaTensor> described;
  described.reserve(items.size());
  for (const DeviceTensor& item : items) described.push_back(item.described);
  OtkCudaRead* read;
  OtkCudaStatus status =
      otk_cuda_launch(items[0].key->device.id, stream, described.data(), described.size(), &read, &text);
  if (status != OTK_CUDA_OK) return status;
  PyThreadState* released = PyEval_SaveThread();
  status = otk_cuda_wait(read, &text);
  for (size_t i = 0; status == OTK_CUDA_OK && i < items.size(); ++i) {
    KeyObject* key = items[i].key;
    const OtkCudaResult result = otk_cuda_result(read, i);
    memcpy(key->content(), result.content, key->nbytes);
    seal(key, {result.digest_low, result.digest_high});
  }
  otk_cuda_release(read);
  PyEval_RestoreThread(released);
  return status;
}

// One try. OTK_CUDA_UNPREPARED: other code has run, so describe the tensors anew and try again. With OTK_CUDA_OK the
// keys may be left to torch; an error may be set.
OtkCudaStatus try_to_read(std::vector<DeviceTensor>& items, CudaUse use, OtkCudaText& text) {
  const int32_t device = items[0].key->device.id;
  if (use == CudaUse::kWhereRight && trust[device] != Trust::kRight) {
    return trust[device] == Trust::kChecking ? OTK_CUDA_OK : check_first_use(items, text);
  }
  void* stream = nullptr;
  if (!current_stream(items[0].key->device, &stream)) return OTK_CUDA_OK;
  OtkCudaStatus status = launch_and_wait(items, stream, text);
  if (status != OTK_CUDA_UNPREPARED) return status;
  status = prepare(items, text);
  return status == OTK_CUDA_OK ? OTK_CUDA_UNPREPARED : status;
}

}  // namespace

bool read_cuda(std::vector<DeviceTensor>& items, uint64_t max_bytes, CudaUse use, Reason& reason) {
  if (items[0].key->device.type != kCudaDevice || use == CudaUse::kNever) return true;
  const bool one_device = std::all_of(items.begin(), items.end(), [&](const DeviceTensor& item) {
    return item.key->device.type == kCudaDevice && item.key->device.id == items[0].key->device.id;
  });
  if (use == CudaUse::kAlways && !one_device) return leave_to_torch(use, "they are on several devices.");
  if (!one_device || (is_wrong && use == CudaUse::kWhereRight)) return true;
  OtkCudaText text;
  OtkCudaStatus status = try_to_read(items, use, text);
  while (status == OTK_CUDA_UNPREPARED) {
    if (!describe_again(items, max_bytes, reason)) return false;
    if (reason != Reason::kNone) return true;
    status = try_to_read(items, use, text);
  }
  switch (status) {
    case OTK_CUDA_OK:
      return PyErr_Occurred() == nullptr;
    case OTK_CUDA_CAPTURING:
      reason = Reason::kGraphCapture;
      return true;
    case OTK_CUDA_UNAVAILABLE:
      return leave_to_torch(use, text.text);
    default:
      PyErr_SetString(PyExc_RuntimeError, text.text);
      return false;
  }
}

#endif  // OTK_CUDA_BUILD

}  // namespace otk::py
