// The stand-in runtime as its kernels see it.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <functional>
#include <string>

namespace fake {

// Counts a call; the error that it was told to fail with.
cudaError_t call(const char* name);

// Gives a thread without a context that of device 0, as CUDA's runtime does in nearly every call.
void use_context();

// Queues work on a stream of the current device. What it throws makes the wait for the stream fail.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

// The end of the pinned memory that holds `address`; 0 for other memory.
uint64_t pinned_end(uint64_t address);

}  // namespace fake
