// What the kernel is asked for: one request per tensor, by value in the kernel's parameters.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "../hash/xxh3.h"
#include "unit.h"

namespace otk::cuda {

constexpr uint32_t kBatch = 16;    // tensors per launch
constexpr uint32_t kMaxUnit = 16;  // bytes of the widest load

// The content is a loop nest over units, each one load.
struct Request {
  const uint8_t* source;
  uint8_t* content;  // kMaxUnit-aligned, with room for nbytes rounded up to kMaxUnit
  xxh3::Digest* digest;
  uint64_t nbytes;
  uint32_t unit;  // bytes: a power of two up to kMaxUnit that divides the address of every unit
  uint32_t ndim;  // 1 to OTK_CUDA_MAX_DIMS
  // In units. With one dimension it is not read: the content is contiguous then, or one stride apart, and up to
  // unit - 1 bytes may follow the last whole unit of a contiguous one.
  uint32_t shape[OTK_CUDA_MAX_DIMS];
  int64_t strides[OTK_CUDA_MAX_DIMS];  // in bytes
};

struct Batch {
  Request requests[kBatch];
};
static_assert(sizeof(Batch) <= 4096, "kernel parameters of every GPU and driver");

// Loads the kernel on the current device, which a first launch would do while others wait.
cudaError_t load_kernel();

// Starts one launch that serves the first `count` requests of `batch`, on the current device.
cudaError_t launch_batch(const Batch& batch, uint32_t count, cudaStream_t stream);

// Fills `request` but for its outputs; false for a layout that the kernel cannot read. A misaligned load would end the
// process's CUDA context, so the unit follows from the addresses and not from the dtype.
inline bool plan(const OtkCudaTensor& tensor, Request& request) {
  uint32_t ndim = tensor.ndim;
  if (ndim > OTK_CUDA_MAX_DIMS) return false;
  // Bytes that lie together: the innermost dimension, or one item.
  uint64_t run = tensor.item_size;
  if (ndim > 0 && tensor.strides[ndim - 1] == 1) run *= static_cast<uint64_t>(tensor.shape[--ndim]);
  uint64_t bits = reinterpret_cast<uintptr_t>(tensor.data) | kMaxUnit;
  if (ndim > 0) bits |= run;
  for (uint32_t i = 0; i < ndim; ++i) {
    request.shape[i] = static_cast<uint32_t>(tensor.shape[i]);
    request.strides[i] = tensor.strides[i] * static_cast<int64_t>(tensor.item_size);
    bits |= static_cast<uint64_t>(request.strides[i]);
  }
  const uint64_t unit = bits & (~bits + 1);  // the lowest bit that is set
  if (tensor.nbytes / unit > INT32_MAX) return false;
  if (ndim == 0 || run != unit) {
    if (ndim == OTK_CUDA_MAX_DIMS) return false;
    request.shape[ndim] = static_cast<uint32_t>(run / unit);
    request.strides[ndim++] = static_cast<int64_t>(unit);
  }
  request.source = static_cast<const uint8_t*>(tensor.data);
  request.nbytes = tensor.nbytes;
  request.unit = static_cast<uint32_t>(unit);
  request.ndim = ndim;
  return true;
}

}  // namespace otk::cuda
