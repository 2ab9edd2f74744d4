// Where the time of a read goes, without Python: the least and the median µs of 15 repeats. Built by build.py.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "cuda/request.h"
#include "cuda/unit.h"
#include "hash/xxh3_dispatch.h"

using namespace otk::cuda;

namespace {

constexpr size_t kSize = 8192;  // one tensor of [1, 1024] int64
constexpr int kTensors = 16;

#define REQUIRE(call)                                           \
  do {                                                          \
    if (const auto error = (call)) {                            \
      printf("%s: error %d\n", #call, static_cast<int>(error)); \
      exit(2);                                                  \
    }                                                           \
  } while (0)

__global__ void empty() {}

__global__ void empty_with_parameters(const __grid_constant__ Batch) {}

// As much shared memory as the kernel takes.
__global__ void __launch_bounds__(512) empty_with_shared_memory(uint64_t* memory) {
  __shared__ uint64_t words[5168];
  if (memory == nullptr) return;
  words[threadIdx.x] = *memory;
  __syncthreads();
  *memory = words[threadIdx.x ^ 1];
}

struct Copies {
  const uint4* from[2];
  uint4* to[2];
};

// The content alone, for a hash on the host.
__global__ void __launch_bounds__(512) gather(const __grid_constant__ Copies copies) {
  copies.to[blockIdx.x][threadIdx.x] = copies.from[blockIdx.x][threadIdx.x];
}

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void show(const char* name, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  printf("%-66s %8.3f %8.3f\n", name, times[0], times[times.size() / 2]);
}

void time(const char* name, const std::function<void()>& work, int count = 1000) {
  for (int i = 0; i < 50; ++i) work();
  std::vector<double> times;
  for (int repeat = 0; repeat < 15; ++repeat) {
    const double begin = now();
    for (int i = 0; i < count; ++i) work();
    times.push_back((now() - begin) / count);
  }
  show(name, times);
}

// After other work has filled the caches of the device.
void time_cold(const char* name, char* trash, const std::function<void()>& work) {
  std::vector<double> times;
  for (int repeat = 0; repeat < 200; ++repeat) {
    REQUIRE(cudaMemset(trash, repeat, 512 << 20));
    REQUIRE(cudaDeviceSynchronize());
    const double begin = now();
    work();
    times.push_back(now() - begin);
  }
  show(name, times);
}

}  // namespace

int main() {
  REQUIRE(cudaSetDevice(0));
  uint8_t *device, *pinned;
  char* trash;
  REQUIRE(cudaMalloc(&device, kTensors * kSize));
  REQUIRE(cudaMalloc(&trash, 512 << 20));
  REQUIRE(cudaHostAlloc(&pinned, (kTensors + 1) * kSize, cudaHostAllocPortable | cudaHostAllocMapped));
  REQUIRE(cudaMemset(device, 7, kTensors * kSize));
  std::vector<uint8_t> host(kTensors * kSize);

  OtkCudaTensor tensors[kTensors];
  Batch batch{};
  for (int i = 0; i < kTensors; ++i) {
    tensors[i] = {device + i * kSize, kSize, 8, 1, {1024}, {1}};
    if (!plan(tensors[i], batch.requests[i])) return 3;
    batch.requests[i].content = pinned + kSize + i * kSize;
    batch.requests[i].digest = reinterpret_cast<otk::xxh3::Digest*>(pinned) + i;
  }
  Copies copies{};
  for (int i = 0; i < 2; ++i) {
    copies.from[i] = reinterpret_cast<const uint4*>(tensors[i].data);
    copies.to[i] = reinterpret_cast<uint4*>(batch.requests[i].content);
  }
  cudaStream_t stream = nullptr;
  const auto wait = [&] { REQUIRE(cudaStreamSynchronize(stream)); };
  const auto read = [&](size_t count) {
    OtkCudaRead* made;
    OtkCudaText text;
    OtkCudaStatus status = otk_cuda_launch(0, stream, tensors, count, &made, &text);
    if (status == OTK_CUDA_UNPREPARED && otk_cuda_prepare(0, count, count * kSize, &text) == OTK_CUDA_OK) {
      status = otk_cuda_launch(0, stream, tensors, count, &made, &text);
    }
    if (status != OTK_CUDA_OK || otk_cuda_wait(made, &text) != OTK_CUDA_OK) {
      puts(text.text);
      exit(2);
    }
    for (size_t i = 0; i < count; ++i) memcpy(&host[i * kSize], otk_cuda_result(made, i).content, kSize);
    otk_cuda_release(made);
  };
  const auto hash_on_host = [&] {
    for (int i = 0; i < 2; ++i) otk::xxh3::copy_and_hash(&host[i * kSize], pinned + kSize + i * kSize, kSize);
  };
  const auto kernel = [&](uint32_t count) { REQUIRE(launch_batch(batch, count, stream)); };

  printf("%-66s %8s %8s\n", "µs", "least", "median");
  time("floor: empty<<<1, 32>>>, wait", [&] { empty<<<1, 32, 0, stream>>>(), wait(); });
  time("empty<<<2, 512>>> with the kernel's parameters, wait",
       [&] { empty_with_parameters<<<2, 512, 0, stream>>>(batch), wait(); });
  time("empty<<<2, 512>>> with the kernel's shared memory, wait",
       [&] { empty_with_shared_memory<<<2, 512, 0, stream>>>(nullptr), wait(); });
  time("the kernel, 2 tensors, wait", [&] { kernel(2), wait(); });
  time("the kernel, 16 tensors, wait", [&] { kernel(16), wait(); });
  time("the unit and a copy of the content, 2 tensors", [&] { read(2); });
  time("the unit and a copy of the content, 16 tensors", [&] { read(16); }, 300);
  time("gather alone, wait", [&] { gather<<<2, 512, 0, stream>>>(copies), wait(); });
  time("gather alone, wait, hash on the host", [&] { gather<<<2, 512, 0, stream>>>(copies), wait(), hash_on_host(); });
  time("2 cudaMemcpyAsync to pinned memory, wait", [&] {
    for (int i = 0; i < 2; ++i) {
      REQUIRE(cudaMemcpyAsync(pinned + i * kSize, device + i * kSize, kSize, cudaMemcpyDeviceToHost, stream));
    }
    wait();
  });
  time("hash on the host, 2 tensors, warm", hash_on_host);
  time("cudaStreamSynchronize(), idle", wait);
  time("cudaSetDevice()", [&] { REQUIRE(cudaSetDevice(0)); });
  const auto get_context =
      reinterpret_cast<int (*)(void**)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxGetCurrent"));
  time("cuCtxGetCurrent()", [&] {
    void* context;
    REQUIRE(get_context(&context));
  });
  time("cudaStreamIsCapturing()", [&] {
    cudaStreamCaptureStatus status;
    REQUIRE(cudaStreamIsCapturing(stream, &status));
  });
  time("cudaThreadExchangeStreamCaptureMode(), twice", [&] {
    auto mode = cudaStreamCaptureModeRelaxed;
    REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode));
    REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode));
  });
  time_cold("cold caches: empty, wait", trash, [&] { empty<<<1, 32, 0, stream>>>(), wait(); });
  time_cold("cold caches: the kernel, 2 tensors, wait", trash, [&] { kernel(2), wait(); });
  time_cold("cold caches: gather alone, wait", trash, [&] { gather<<<2, 512, 0, stream>>>(copies), wait(); });
  return 0;
}
