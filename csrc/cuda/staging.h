// Pinned host memory that the kernel writes to, on loan from a pool.
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include <utility>

namespace otk::cuda {

// A loan. The memory goes back to the pool with it, unless it was abandoned.
class Staging {
 public:
  Staging() = default;
  Staging(Staging&& other) noexcept : buffer_(std::exchange(other.buffer_, nullptr)) {}
  Staging& operator=(Staging&& other) noexcept {
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~Staging();

  // Borrows at least `size` bytes, aligned to a page. Every device can write to them at this address.
  cudaError_t borrow(size_t size);

  // Never lends the memory again: a device may still write to it.
  void abandon() { buffer_ = nullptr; }

  uint8_t* data() const;

 private:
  struct Buffer;
  class Pool;
  static Pool& pool();

  Buffer* buffer_ = nullptr;
};

}  // namespace otk::cuda
