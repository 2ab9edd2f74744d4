// Pinned host memory that the kernel writes to, on loan from a pool.
#pragma once

#include <cuda_runtime_api.h>

#include "unit.h"

// A loan: a buffer, and what is read into it. Digests come first, then where each content is, then the contents.
struct OtkCudaRead {
  uint8_t* data;
  size_t size;
  OtkCudaRead* next;  // in the pool
  OtkCudaScope scope;
  int32_t device;
  cudaStream_t stream;
  bool in_flight;  // the device may write to the buffer
  size_t count;
};

namespace otk::cuda {

// Takes the smallest free buffer of at least `size` bytes, aligned to a page; null where there is none.
OtkCudaRead* borrow_staging(size_t size);

void return_staging(OtkCudaRead* read);

// Allocates a buffer and puts it into the pool. Every device can write to it at the host's address.
cudaError_t add_staging(size_t size);

}  // namespace otk::cuda
