// Reading CUDA tensors into their keys with the CUDA unit.
#pragma once

#include <vector>

#include "../cuda/unit.h"
#include "tensor_key.h"

namespace otk::py {

// Another value puts the test device in CUDA's place, on machines without a GPU.
#if !defined(OTK_CUDA_DEVICE)
#define OTK_CUDA_DEVICE dlpack::kCuda
#endif
constexpr int32_t kCudaDevice = OTK_CUDA_DEVICE;

// What the CUDA unit in this build was compiled with and for, or null in a build without it.
extern const char* const cuda_build;

// Whether a call's CUDA tensors are read by the unit: where it has been found right on their device, always (an error
// is raised where it cannot), or never.
enum class CudaUse { kWhereRight, kAlways, kNever };

// A tensor on a device, its key, and its description where the device is CUDA's. The references are borrowed.
struct DeviceTensor {
  PyObject* tensor;
  KeyObject* key;
  OtkCudaTensor described;
};

// Fills `described` from a view that was made right now.
void describe_cuda(const TensorView& view, OtkCudaTensor& described);

// Fills and seals the keys of one or more device tensors, which were described since other code last ran. They stay as
// they are, for torch to copy, where they are not all on one CUDA device or where the unit cannot read them. False with
// an error set; `reason` says why the call must bypass instead.
bool read_cuda(std::vector<DeviceTensor>& tensors, uint64_t max_bytes, CudaUse use, Reason& reason);

// The functions of omni_tensor_key.keys that are called for CUDA tensors: check_cuda_unit(tensor) tells whether the
// unit is to be used on its device, or None where that cannot be told now; note_host_copy(why) logs why torch copies.
// Borrowed for the life of the process.
void set_cuda_functions(PyObject* check_cuda_unit, PyObject* note_host_copy);

}  // namespace otk::py
