// In the kernel's place: the same answers from the host's hash, for machines without nvcc.
#include <vector>

#include "../../../csrc/cuda/request.h"
#include "../../../csrc/hash/xxh3_dispatch.h"
#include "fake.h"

namespace {

uint8_t poison = 0;  // the test device keeps its bytes XOR-ed with this
bool wrong = false;  // the last of the bytes that are read one by one is another one

void read_tensor(const otk::cuda::Request& request) {
  uint64_t index[OTK_CUDA_MAX_DIMS] = {};
  for (uint64_t at = 0; at < request.nbytes; at += request.unit) {
    int64_t offset = 0;
    for (uint32_t d = 0; d < request.ndim; ++d) offset += static_cast<int64_t>(index[d]) * request.strides[d];
    for (uint64_t i = 0; i < request.unit && at + i < request.nbytes; ++i) {
      request.content[at + i] = request.source[offset + static_cast<int64_t>(i)] ^ poison;
    }
    ++index[request.ndim - 1];
    for (uint32_t d = request.ndim - 1; d > 0 && index[d] == request.shape[d]; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
  if (wrong && request.unit == 1) request.content[request.nbytes - 1] ^= 1;
  *request.digest = otk::xxh3::hash(request.content, request.nbytes);
}

}  // namespace

cudaError_t otk::cuda::load_kernel() { return fake::call("load"); }

cudaError_t otk::cuda::launch_batch(const Batch& batch, uint32_t count, cudaStream_t stream) {
  const std::vector<Request> requests(batch.requests, batch.requests + count);
  return fake::enqueue(stream, [requests] {
    for (const Request& request : requests) read_tensor(request);
  });
}

extern "C" __attribute__((visibility("default"))) void fake_poison(int byte) { poison = static_cast<uint8_t>(byte); }

extern "C" __attribute__((visibility("default"))) void fake_be_wrong() { wrong = true; }
