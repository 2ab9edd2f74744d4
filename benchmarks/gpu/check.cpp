// The CUDA unit on a real GPU, without Python: for compute-sanitizer, whose racecheck needs a small program. Built by
// build.py.
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "../../csrc/cuda/unit.h"
#include "../../csrc/hash/xxh3_dispatch.h"

namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  printf("%s: %s\n", what, cudaGetErrorString(error));
  exit(2);
}

// A tensor on the device, exactly as large as it must be, and what its content is.
struct Case {
  OtkCudaTensor tensor{};
  std::vector<uint8_t> content;
};

Case make_case(size_t items, uint32_t item_size, int64_t stride, size_t offset, uint32_t seed) {
  std::vector<uint8_t> storage(offset + ((items - 1) * stride + 1) * item_size);
  std::mt19937 random(seed);
  for (uint8_t& byte : storage) byte = static_cast<uint8_t>(random());
  Case made;
  for (size_t i = 0; i < items * item_size; ++i) {
    made.content.push_back(storage[offset + i / item_size * stride * item_size + i % item_size]);
  }
  void* device;
  require(cudaMalloc(&device, storage.size()), "cudaMalloc");
  require(cudaMemcpy(device, storage.data(), storage.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  made.tensor.data = static_cast<const uint8_t*>(device) + offset;
  made.tensor.nbytes = items * item_size;
  made.tensor.item_size = item_size;
  made.tensor.ndim = 1;
  made.tensor.shape[0] = static_cast<int64_t>(items);
  made.tensor.strides[0] = stride;
  return made;
}

bool check(const std::vector<Case>& cases, cudaStream_t stream) {
  std::vector<OtkCudaTensor> tensors;
  for (const Case& one : cases) tensors.push_back(one.tensor);
  uint64_t nbytes = 0;
  for (const OtkCudaTensor& tensor : tensors) nbytes += tensor.nbytes;
  OtkCudaRead* read;
  OtkCudaText text;
  OtkCudaStatus status = otk_cuda_launch(0, stream, tensors.data(), tensors.size(), &read, &text);
  if (status == OTK_CUDA_UNPREPARED && otk_cuda_prepare(0, tensors.size(), nbytes, &text) == OTK_CUDA_OK) {
    status = otk_cuda_launch(0, stream, tensors.data(), tensors.size(), &read, &text);
  }
  if (status != OTK_CUDA_OK || otk_cuda_wait(read, &text) != OTK_CUDA_OK) {
    printf("%s\n", text.text);
    return false;
  }
  bool right = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    const OtkCudaResult result = otk_cuda_result(read, i);
    const std::vector<uint8_t>& content = cases[i].content;
    const otk::xxh3::Digest digest = otk::xxh3::hash(content.data(), content.size());
    const bool same = memcmp(result.content, content.data(), content.size()) == 0;
    if (same && result.digest_low == digest.low && result.digest_high == digest.high) continue;
    printf("wrong %s: %zu bytes, items of %u, stride %d\n", same ? "digest" : "content", content.size(),
           tensors[i].item_size, static_cast<int>(tensors[i].strides[0]));
    right = false;
  }
  otk_cuda_release(read);
  return right;
}

}  // namespace

int main() {
  std::vector<Case> cases;
  uint32_t seed = 0;
  for (const size_t size :
       {1, 2, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 8192, 32768, 32831, 32832, 66000}) {
    for (const uint32_t item_size : {1, 2, 4, 8}) {
      for (const int64_t stride : {1, 3}) {
        for (const size_t offset : {0, 1, 8}) {
          cases.push_back(make_case(size / item_size + 1, item_size, stride, offset, ++seed));
        }
      }
    }
  }
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  if (!check(cases, stream)) return 1;
  for (const Case& one : cases) {
    if (!check({one}, nullptr)) return 1;
  }
  printf("%zu tensors read right\n", cases.size());
  return 0;
}
