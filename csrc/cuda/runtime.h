// The CUDA runtime of this process: how it is found, entered and left, and how its errors are told.
#pragma once

#include <cuda_runtime_api.h>

#include "unit.h"

namespace otk::cuda {

// Finds driver and devices at its first call. OTK_CUDA_UNAVAILABLE is final.
OtkCudaStatus find_runtime(OtkCudaText* text);

// Whether otk_cuda_prepare() has succeeded for a device in this process, and not in the one that it was forked from.
bool is_prepared(int32_t device);

// Says so, once the device's context is current.
OtkCudaStatus note_prepared(int32_t device, OtkCudaText* text);

// The status for what `call` returned on `device`, which may be -1 for none; with a text where it is an error.
OtkCudaStatus status_of(cudaError_t error, const char* call, int device, OtkCudaText* text);

}  // namespace otk::cuda
