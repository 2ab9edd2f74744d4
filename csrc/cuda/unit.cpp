#include "unit.h"

#include <stdio.h>

#include <deque>
#include <memory>
#include <new>
#include <vector>

#include "kernel.h"
#include "request.h"
#include "runtime.h"
#include "staging.h"

namespace otk::cuda {
namespace {

// Outputs that a warp writes together begin together.
constexpr size_t kAlign = 128;

size_t align(size_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

cudaStream_t stream_of(const OtkCudaGroup& group) { return static_cast<cudaStream_t>(group.stream); }

OtkCudaStatus check_capture(const OtkCudaGroup& group, OtkCudaText* text) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream_of(group), &capture);
  if (error == cudaErrorStreamCaptureImplicit) {
    // The default stream, while a stream that it would wait for is being captured.
    cudaGetLastError();
    return OTK_CUDA_CAPTURING;
  }
  if (error != cudaSuccess) return report(error, "cudaStreamIsCapturing()", group.device, text);
  return capture == cudaStreamCaptureStatusNone ? OTK_CUDA_OK : OTK_CUDA_CAPTURING;
}

// The part of a read that is one group's. It does not go away before the device has stopped writing to its memory.
class GroupRead {
 public:
  explicit GroupRead(const OtkCudaGroup& group) : group_(group) {}
  GroupRead(const GroupRead&) = delete;
  GroupRead& operator=(const GroupRead&) = delete;
  ~GroupRead() {
    OtkCudaText untold;
    if (in_flight_) wait(&untold);
  }

  // The device must be current. Appends a result for each tensor, without its digest.
  OtkCudaStatus launch(std::vector<OtkCudaResult>& results, OtkCudaText* text);

  OtkCudaStatus wait(OtkCudaText* text) {
    const RelaxedCaptureMode relaxed;
    const DeviceGuard guard(driver(), group_.device);
    const char* call = "cudaSetDevice()";
    cudaError_t error = guard.error();
    if (error == cudaSuccess) {
      call = "cudaStreamSynchronize()";
      error = cudaStreamSynchronize(stream_of(group_));
    }
    in_flight_ = false;
    if (error == cudaSuccess) return OTK_CUDA_OK;
    staging_.abandon();
    return report(error, call, group_.device, text);
  }

  // After wait(): sets the digests of `results`, which begin with this group's, and returns where the next group's do.
  OtkCudaResult* set_digests(OtkCudaResult* results) const {
    const auto* digests = reinterpret_cast<const xxh3::Digest*>(staging_.data());
    for (size_t i = 0; i < group_.count; ++i) {
      results[i].digest_low = digests[i].low;
      results[i].digest_high = digests[i].high;
    }
    return results + group_.count;
  }

 private:
  OtkCudaGroup group_;  // its tensors are only there during the launch
  Staging staging_;
  bool in_flight_ = false;
};

OtkCudaStatus GroupRead::launch(std::vector<OtkCudaResult>& results, OtkCudaText* text) {
  const size_t digest_size = align(sizeof(xxh3::Digest) * group_.count);
  size_t size = digest_size;
  for (size_t i = 0; i < group_.count; ++i) size += align(group_.tensors[i].nbytes);
  const cudaError_t borrowed = staging_.borrow(size);
  if (borrowed != cudaSuccess) return report(borrowed, "cudaHostAlloc()", group_.device, text);

  auto* digest = reinterpret_cast<xxh3::Digest*>(staging_.data());
  uint8_t* content = staging_.data() + digest_size;
  for (size_t begin = 0; begin < group_.count; begin += kBatch) {
    Batch batch{};
    uint32_t count = 0;
    for (; count < kBatch && begin + count < group_.count; ++count) {
      const OtkCudaTensor& tensor = group_.tensors[begin + count];
      Request& request = batch.requests[count];
      if (!plan(tensor, request)) {
        snprintf(text->text, sizeof text->text, "omni_tensor_key: the kernel cannot read a tensor's layout.");
        return OTK_CUDA_UNAVAILABLE;
      }
      request.digest = digest++;
      request.content = content;
      results.push_back({content, 0, 0});
      content += align(tensor.nbytes);
    }
    const cudaError_t error = launch_batch(batch, count, stream_of(group_));
    if (error != cudaSuccess) return report(error, "launching the kernel", group_.device, text);
    in_flight_ = true;
  }
  return OTK_CUDA_OK;
}

}  // namespace
}  // namespace otk::cuda

using namespace otk::cuda;

struct OtkCudaRead {
  std::deque<GroupRead> groups;  // they stay where they are made
  std::vector<OtkCudaResult> results;
};

namespace {

OtkCudaStatus launch_all(const OtkCudaGroup* groups, size_t count, OtkCudaRead& read, OtkCudaText* text) {
  // One group, as nearly always, is asked under the guard of its launch.
  for (size_t i = 0; count > 1 && i < count; ++i) {
    const DeviceGuard guard(driver(), groups[i].device);
    if (guard.error() != cudaSuccess) return report(guard.error(), "cudaSetDevice()", groups[i].device, text);
    const OtkCudaStatus status = check_capture(groups[i], text);
    if (status != OTK_CUDA_OK) return status;
  }
  for (size_t i = 0; i < count; ++i) {
    const DeviceGuard guard(driver(), groups[i].device);
    if (guard.error() != cudaSuccess) return report(guard.error(), "cudaSetDevice()", groups[i].device, text);
    OtkCudaStatus status = count > 1 ? OTK_CUDA_OK : check_capture(groups[i], text);
    if (status != OTK_CUDA_OK) return status;
    status = read.groups.emplace_back(groups[i]).launch(read.results, text);
    if (status != OTK_CUDA_OK) return status;
  }
  return OTK_CUDA_OK;
}

OtkCudaStatus out_of_memory(OtkCudaText* text) {
  snprintf(text->text, sizeof text->text, "omni_tensor_key: out of memory while reading CUDA tensors");
  return OTK_CUDA_FAILED;
}

}  // namespace

bool otk_cuda_readable(const OtkCudaTensor* tensor) {
  Request request;
  return plan(*tensor, request);
}

OtkCudaStatus otk_cuda_launch(const OtkCudaGroup* groups, size_t count, OtkCudaRead** read, OtkCudaText* text) {
  try {
    OtkCudaStatus status = find_runtime(text);
    if (status != OTK_CUDA_OK) return status;
    const RelaxedCaptureMode relaxed;
    auto launched = std::make_unique<OtkCudaRead>();
    status = launch_all(groups, count, *launched, text);
    if (status == OTK_CUDA_OK) *read = launched.release();
    return status;
  } catch (const std::bad_alloc&) {
    return out_of_memory(text);
  }
}

OtkCudaStatus otk_cuda_wait(OtkCudaRead* read, OtkCudaText* text) {
  // The first error is the one to tell; the other groups are waited for all the same.
  OtkCudaStatus first = OTK_CUDA_OK;
  OtkCudaText untold;
  for (GroupRead& group : read->groups) {
    const OtkCudaStatus status = group.wait(first == OTK_CUDA_OK ? text : &untold);
    if (first == OTK_CUDA_OK) first = status;
  }
  if (first != OTK_CUDA_OK) return first;
  OtkCudaResult* results = read->results.data();
  for (const GroupRead& group : read->groups) results = group.set_digests(results);
  return OTK_CUDA_OK;
}

OtkCudaResult otk_cuda_result(const OtkCudaRead* read, size_t index) { return read->results[index]; }

void otk_cuda_release(OtkCudaRead* read) { delete read; }
