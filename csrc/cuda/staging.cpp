#include "staging.h"

#include <mutex>
#include <new>

namespace otk::cuda {
namespace {

// Two prompts of 8 KiB or 16 of them, with room to spare: one buffer for each thread, in nearly every process.
constexpr size_t kSmallest = 256 * 1024;

// Buffers are never freed while the process lives: freeing pinned memory would wait for every stream of every device.
// There are as many as were ever on loan at a time; their sizes are powers of two, so together they are at most twice
// the largest of each.
std::mutex mutex;
OtkCudaRead* free_reads = nullptr;

}  // namespace

OtkCudaRead* borrow_staging(size_t size) {
  const std::lock_guard<std::mutex> lock(mutex);
  OtkCudaRead** best = nullptr;
  for (OtkCudaRead** link = &free_reads; *link != nullptr; link = &(*link)->next) {
    if ((*link)->size >= size && (best == nullptr || (*link)->size < (*best)->size)) best = link;
  }
  if (best == nullptr) return nullptr;
  OtkCudaRead* read = *best;
  *best = read->next;
  return read;
}

void return_staging(OtkCudaRead* read) {
  const std::lock_guard<std::mutex> lock(mutex);
  read->next = free_reads;
  free_reads = read;
}

cudaError_t add_staging(size_t size) {
  size_t rounded = kSmallest;
  while (rounded < size) rounded *= 2;
  // Unified addressing, which every 64-bit Linux has, makes one address valid on the host and on all devices.
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, rounded, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) return error;
  auto* read = new (std::nothrow) OtkCudaRead{};
  if (read == nullptr) {
    cudaFreeHost(data);
    return cudaErrorMemoryAllocation;
  }
  read->data = static_cast<uint8_t*>(data);
  read->size = rounded;
  return_staging(read);
  return cudaSuccess;
}

}  // namespace otk::cuda
