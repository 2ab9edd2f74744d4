// The CUDA unit: the content and the digest of tensors of one device, with one wait and a launch for each 16 of them.
//
// A C interface, so that the unit can be built by nvcc without torch and without Python. Nothing here throws, and
// nothing touches CUDA before the first otk_cuda_prepare().
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
  uint32_t ndim;  // more than OTK_CUDA_MAX_DIMS: the unit cannot serve it
  int64_t shape[OTK_CUDA_MAX_DIMS];
  int64_t strides[OTK_CUDA_MAX_DIMS];  // in items
};

enum OtkCudaStatus {
  OTK_CUDA_OK,
  OTK_CUDA_UNPREPARED,   // otk_cuda_prepare() must be called first; nothing was launched
  OTK_CUDA_CAPTURING,    // the stream is being captured into a graph; nothing was launched
  OTK_CUDA_UNAVAILABLE,  // the unit cannot serve these tensors here: copy them to the host by other means
  OTK_CUDA_FAILED,       // CUDA reported an error
};

// What to tell the user; set with OTK_CUDA_UNAVAILABLE and OTK_CUDA_FAILED.
struct OtkCudaText {
  char text[512];
};

// The context and the capture mode that a thread had before otk_cuda_enter().
struct OtkCudaScope {
  void* context;
  bool changed;
  int mode;
};

// Launched work and the staging memory that it writes to.
struct OtkCudaRead;

struct OtkCudaResult {
  const uint8_t* content;  // nbytes bytes in row-major order, in memory of the read
  uint64_t digest_low;
  uint64_t digest_high;
};

// Does what takes long at first use: finds the runtime, makes the device's context, loads the kernel and allocates
// staging memory for a read of `count` tensors with `nbytes` bytes of content in all. Call it without locks.
OtkCudaStatus otk_cuda_prepare(int32_t device, size_t count, uint64_t nbytes, OtkCudaText* text);

// Makes a device's context current, and lets this thread do what would otherwise end a capture on another thread.
// After otk_cuda_prepare() for this device. otk_cuda_leave() undoes it on the same thread, also after an error.
OtkCudaStatus otk_cuda_enter(int32_t device, struct OtkCudaScope* scope, OtkCudaText* text);
void otk_cuda_leave(const struct OtkCudaScope* scope);

// Launches what reads all tensors in the order of `stream`, a cudaStream_t; null is the legacy default stream. Takes no
// memory and no lock that waits for a device. The tensors' memory must stay allocated until the wait is over; `*read`
// is valid with OTK_CUDA_OK only, and is used and released by this thread.
OtkCudaStatus otk_cuda_launch(int32_t device, void* stream, const OtkCudaTensor* tensors, size_t count,
                              OtkCudaRead** read, OtkCudaText* text);

// Waits for a read. Call it without locks that the work on the stream may need.
OtkCudaStatus otk_cuda_wait(OtkCudaRead* read, OtkCudaText* text);

// The result of the tensor at `index`; after a wait that returned OTK_CUDA_OK.
OtkCudaResult otk_cuda_result(const OtkCudaRead* read, size_t index);

// Waits if nobody has, gives the staging memory back, and leaves the device.
void otk_cuda_release(OtkCudaRead* read);

}  // extern "C"
