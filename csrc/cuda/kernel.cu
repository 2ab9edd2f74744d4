#include "kernel.h"
#include "phases.h"

namespace otk::cuda {
namespace {

constexpr uint32_t kThreads = 512;  // 8 KiB, a prompt of 1,024 int64 IDs, is one 16-byte load for each
static_assert(kThreads % kWarp == 0 && kThreads >= kLanes);

// One block per tensor. Every thread takes every barrier: the number of phases depends on the block alone.
//
// Content and digest go to the host's pinned memory by plain stores. No fence is needed: the host reads them after it
// has synchronized with the stream, and the end of a kernel makes all its writes visible to the host before that
// returns.
__global__ void __launch_bounds__(kThreads) read_tensors(const __grid_constant__ Batch batch) {
  __shared__ Shared shared;
  const Request& request = batch.requests[blockIdx.x];
  const uint32_t phases = phase_count(request);
  for (uint32_t phase = 0; phase < phases; ++phase) {
    if (phase > 0) __syncthreads();
    run_phase(request, phase, threadIdx.x, kThreads, shared);
  }
}

}  // namespace

cudaError_t load_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(read_tensors));
}

cudaError_t launch_batch(const Batch& batch, uint32_t count, cudaStream_t stream) {
  // Not <<<>>>, which tells of an error only through cudaGetLastError(), that is, mixed up with older ones.
  void* arguments[] = {const_cast<Batch*>(&batch)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(read_tensors), dim3(count), dim3(kThreads), arguments, 0,
                          stream);
}

}  // namespace otk::cuda
