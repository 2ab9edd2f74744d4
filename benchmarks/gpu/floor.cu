// An empty kernel's launch and the wait for its stream: the µs of each, for benchmarks/cuda_key.py.
#include <chrono>

__global__ void empty() {}

extern "C" double floor_us(cudaStream_t stream, int count) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    empty<<<1, 32, 0, stream>>>();
    if (cudaStreamSynchronize(stream) != cudaSuccess) return -1;
  }
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / count;
}
