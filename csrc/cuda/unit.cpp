#include "unit.h"

#include <stdio.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

#include "request.h"
#include "runtime.h"

// A loan of pinned host memory that the kernel writes to, and what is read into it: digests, then where each content
// is, then the contents.
struct OtkCudaRead {
  uint8_t* data;
  size_t size;
  OtkCudaRead* next;  // in the pool
  OtkCudaScope scope;
  int32_t device;
  cudaStream_t stream;
  bool in_flight;  // the device may write to the memory
  size_t count;
};

namespace otk::cuda {
namespace {

// Two prompts of 8 KiB or 16 of them, with room to spare: one buffer for each thread, in nearly every process.
constexpr size_t kSmallest = 256 * 1024;

// The pool. Buffers are never freed while the process lives: freeing pinned memory would wait for every stream of every
// device. There are as many as were ever on loan at a time; their sizes are powers of two, so together they are at most
// twice the largest of each.
std::mutex mutex;
OtkCudaRead* free_reads = nullptr;

// Takes the smallest free buffer of at least `size` bytes; null where there is none.
OtkCudaRead* borrow(size_t size) {
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

void give_back(OtkCudaRead* read) {
  const std::lock_guard<std::mutex> lock(mutex);
  read->next = free_reads;
  free_reads = read;
}

// Adds a buffer of at least `size` bytes to the pool. Unified addressing, which every 64-bit Linux has, makes its
// address valid on the host and on all devices.
cudaError_t allocate(size_t size) {
  size_t rounded = kSmallest;
  while (rounded < size) rounded *= 2;
  std::unique_ptr<OtkCudaRead> read(new (std::nothrow) OtkCudaRead{});
  if (read == nullptr) return cudaErrorMemoryAllocation;
  const cudaError_t error =
      cudaHostAlloc(reinterpret_cast<void**>(&read->data), rounded, cudaHostAllocPortable | cudaHostAllocMapped);
  read->size = rounded;
  if (error == cudaSuccess) give_back(read.release());
  return error;
}

// Outputs that a warp writes together begin together.
constexpr size_t kAlign = 128;

size_t align(uint64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

size_t heads_size(size_t count) { return align(count * (sizeof(xxh3::Digest) + sizeof(uint8_t*))); }

// At least what a read takes of its buffer.
size_t staging_size(size_t count, uint64_t nbytes) { return heads_size(count) + align(nbytes) + count * kAlign; }

xxh3::Digest* digests_of(const OtkCudaRead& read) { return reinterpret_cast<xxh3::Digest*>(read.data); }

uint8_t** contents_of(const OtkCudaRead& read) { return reinterpret_cast<uint8_t**>(digests_of(read) + read.count); }

OtkCudaStatus check_capture(const OtkCudaRead& read, OtkCudaText* text) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(read.stream, &capture);
  if (error == cudaErrorStreamCaptureImplicit) {
    // The default stream, while a stream that it would wait for is being captured.
    cudaGetLastError();
    return OTK_CUDA_CAPTURING;
  }
  if (capture != cudaStreamCaptureStatusNone) return OTK_CUDA_CAPTURING;
  return status_of(error, "cudaStreamIsCapturing()", read.device, text);
}

OtkCudaStatus launch_all(OtkCudaRead& read, const OtkCudaTensor* tensors, OtkCudaText* text) {
  uint8_t* content = read.data + heads_size(read.count);
  for (size_t begin = 0; begin < read.count; begin += kBatch) {
    Batch batch;
    const auto count = static_cast<uint32_t>(std::min<size_t>(kBatch, read.count - begin));
    for (uint32_t i = 0; i < count; ++i) {
      const OtkCudaTensor& tensor = tensors[begin + i];
      Request& request = batch.requests[i];
      if (!plan(tensor, request)) {
        snprintf(text->text, sizeof text->text, "omni_tensor_key: the kernel cannot read a tensor's layout.");
        return OTK_CUDA_UNAVAILABLE;
      }
      request.digest = digests_of(read) + begin + i;
      request.content = contents_of(read)[begin + i] = content;
      content += align(tensor.nbytes);
    }
    const OtkCudaStatus status =
        status_of(launch_batch(batch, count, read.stream), "launching the kernel", read.device, text);
    if (status != OTK_CUDA_OK) return status;
    read.in_flight = true;
  }
  return OTK_CUDA_OK;
}

}  // namespace
}  // namespace otk::cuda

using namespace otk::cuda;

OtkCudaStatus otk_cuda_prepare(int32_t device, size_t count, uint64_t nbytes, OtkCudaText* text) {
  OtkCudaStatus status = find_runtime(text);
  if (status != OTK_CUDA_OK) return status;
  OtkCudaScope scope;
  status = otk_cuda_enter(device, &scope, text);
  if (status == OTK_CUDA_OK && !is_prepared(device)) {
    status = status_of(load_kernel(), "loading the kernel", device, text);
  }
  if (status == OTK_CUDA_OK) {
    status = status_of(allocate(staging_size(count, nbytes)), "cudaHostAlloc()", device, text);
  }
  if (status == OTK_CUDA_OK) status = note_prepared(device, text);
  otk_cuda_leave(&scope);
  return status;
}

OtkCudaStatus otk_cuda_launch(int32_t device, void* stream, const OtkCudaTensor* tensors, size_t count,
                              OtkCudaRead** read, OtkCudaText* text) {
  if (!is_prepared(device)) return OTK_CUDA_UNPREPARED;
  uint64_t nbytes = 0;
  for (size_t i = 0; i < count; ++i) nbytes += tensors[i].nbytes;
  OtkCudaRead* loan = borrow(staging_size(count, nbytes));
  if (loan == nullptr) return OTK_CUDA_UNPREPARED;
  loan->device = device;
  loan->stream = static_cast<cudaStream_t>(stream);
  loan->count = count;
  loan->in_flight = false;
  OtkCudaStatus status = otk_cuda_enter(device, &loan->scope, text);
  if (status == OTK_CUDA_OK) status = check_capture(*loan, text);
  if (status == OTK_CUDA_OK) status = launch_all(*loan, tensors, text);
  if (status != OTK_CUDA_OK) otk_cuda_release(loan);
  *read = loan;
  return status;
}

OtkCudaStatus otk_cuda_wait(OtkCudaRead* read, OtkCudaText* text) {
  const cudaError_t error = cudaStreamSynchronize(read->stream);
  if (error == cudaSuccess) read->in_flight = false;
  return status_of(error, "cudaStreamSynchronize()", read->device, text);
}

OtkCudaResult otk_cuda_result(const OtkCudaRead* read, size_t index) {
  const otk::xxh3::Digest& digest = digests_of(*read)[index];
  return {contents_of(*read)[index], digest.low, digest.high};
}

void otk_cuda_release(OtkCudaRead* read) {
  OtkCudaText untold;
  if (read->in_flight) otk_cuda_wait(read, &untold);
  otk_cuda_leave(&read->scope);
  // Memory that a device may still write to is never lent again.
  if (!read->in_flight) give_back(read);
}
