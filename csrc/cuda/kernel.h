// The kernel as the launcher sees it.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "request.h"

namespace otk::cuda {

// Loads the kernel on the current device, which a first launch would do while others wait.
cudaError_t load_kernel();

// Starts one launch that serves the first `count` requests of `batch`, on the current device.
cudaError_t launch_batch(const Batch& batch, uint32_t count, cudaStream_t stream);

}  // namespace otk::cuda
