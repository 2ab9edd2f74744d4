// The CUDA unit: the content and the digest of device tensors, with one kernel launch and one wait per device.
//
// A C interface, so that the unit can be built by nvcc without torch and without Python. Nothing here throws, and
// nothing touches CUDA before the first tensor.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { OTK_CUDA_MAX_DIMS = 8 };

extern "C" {

// A strided tensor with as few dimensions as it can be written with; none for one element.
struct OtkCudaTensor {
  const void* data;  // of the first element, in the device's memory
  uint64_t nbytes;   // content size; at least one byte
  uint32_t item_size;
  uint32_t ndim;
  int64_t shape[OTK_CUDA_MAX_DIMS];
  int64_t strides[OTK_CUDA_MAX_DIMS];  // in items
};

// Tensors of one device, read in the order of one stream.
struct OtkCudaGroup {
  int32_t device;
  void* stream;  // a cudaStream_t; null is the legacy default stream
  const OtkCudaTensor* tensors;
  size_t count;
};

enum OtkCudaStatus {
  OTK_CUDA_OK,
  OTK_CUDA_CAPTURING,    // a stream is being captured into a graph; nothing was launched
  OTK_CUDA_UNAVAILABLE,  // the unit cannot serve these tensors here: copy them to the host by other means
  OTK_CUDA_FAILED,       // CUDA reported an error
};

// What to tell the user; set with OTK_CUDA_UNAVAILABLE and OTK_CUDA_FAILED.
struct OtkCudaText {
  char text[512];
};

// Launched work and the staging memory it writes to.
struct OtkCudaRead;

struct OtkCudaResult {
  const uint8_t* content;  // nbytes bytes in row-major order, in memory of the read
  uint64_t digest_low;
  uint64_t digest_high;
};

// Whether the kernel can read this layout. No CUDA call.
bool otk_cuda_readable(const OtkCudaTensor* tensor);

// Launches what reads all tensors. Every stream is asked whether it is being captured before anything is launched. The
// tensors' memory must stay allocated until the read is released; `*read` is set with OTK_CUDA_OK only.
OtkCudaStatus otk_cuda_launch(const OtkCudaGroup* groups, size_t count, OtkCudaRead** read, OtkCudaText* text);

// Waits for a read. Call it without locks that the work on the streams may need.
OtkCudaStatus otk_cuda_wait(OtkCudaRead* read, OtkCudaText* text);

// The result of the tensor at `index`, counted through all groups; after a wait that returned OTK_CUDA_OK.
OtkCudaResult otk_cuda_result(const OtkCudaRead* read, size_t index);

// Waits if nobody has, and gives the staging memory back.
void otk_cuda_release(OtkCudaRead* read);

}  // extern "C"
