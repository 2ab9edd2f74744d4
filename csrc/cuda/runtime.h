// The CUDA runtime of this process: found at the first tensor, and how its errors are told.
#pragma once

#include <cuda_runtime_api.h>

#include "guards.h"
#include "unit.h"

namespace otk::cuda {

// Finds driver and devices at its first call. OTK_CUDA_UNAVAILABLE is final.
OtkCudaStatus find_runtime(OtkCudaText* text);

// After find_runtime() returned OTK_CUDA_OK.
const Driver& driver();

// The status for an error of `call` on `device`, which may be -1 for none; with its text.
OtkCudaStatus report(cudaError_t error, const char* call, int device, OtkCudaText* text);

}  // namespace otk::cuda
