#include "staging.h"

#include <mutex>
#include <new>

namespace otk::cuda {

// Two prompts of 8 KiB or 16 of them, with room to spare: one buffer for each thread, in nearly every process.
constexpr size_t kSmallest = 256 * 1024;

struct Staging::Buffer {
  uint8_t* data;
  size_t size;
  Buffer* next;
};

// Buffers are never freed while the process lives, and there are as many as were ever on loan at a time; their sizes
// are powers of two, so together they are at most twice the largest of each. Freeing pinned memory would wait for every
// stream of every device.
class Staging::Pool {
 public:
  // The smallest free buffer that is large enough, or null.
  Buffer* take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Buffer** best = nullptr;
    for (Buffer** link = &free_; *link != nullptr; link = &(*link)->next) {
      if ((*link)->size >= size && (best == nullptr || (*link)->size < (*best)->size)) best = link;
    }
    if (best == nullptr) return nullptr;
    Buffer* taken = *best;
    *best = taken->next;
    return taken;
  }

  void put(Buffer* buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    buffer->next = free_;
    free_ = buffer;
  }

 private:
  std::mutex mutex_;
  Buffer* free_ = nullptr;
};

// Never destroyed: the driver may be gone before this library's destructors run.
Staging::Pool& Staging::pool() {
  static auto* const pool = new Pool;
  return *pool;
}

Staging::~Staging() {
  if (buffer_ != nullptr) pool().put(buffer_);
}

cudaError_t Staging::borrow(size_t size) {
  buffer_ = pool().take(size);
  if (buffer_ != nullptr) return cudaSuccess;
  size_t rounded = kSmallest;
  while (rounded < size) rounded *= 2;
  // Unified addressing, which every 64-bit Linux has, makes one address valid on the host and on all devices.
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, rounded, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) return error;
  buffer_ = new (std::nothrow) Buffer{static_cast<uint8_t*>(data), rounded, nullptr};
  if (buffer_ != nullptr) return cudaSuccess;
  cudaFreeHost(data);
  return cudaErrorMemoryAllocation;
}

uint8_t* Staging::data() const { return buffer_->data; }

}  // namespace otk::cuda
