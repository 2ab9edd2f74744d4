// What a call changes for its thread, and puts back.
#pragma once

#include <cuda_runtime_api.h>

namespace otk::cuda {

// Two functions of the driver, by their stable names. CUcontext is a pointer, CUresult an int that is 0 for success.
struct Driver {
  int (*get_context)(void** context) = nullptr;
  int (*set_context)(void* context) = nullptr;
};

// Makes a device current, and puts back the context that was. cudaSetDevice() cannot do the latter: on a thread that
// has none yet, it would make device 0's context and take some hundred MiB of a device that may be somebody else's.
class DeviceGuard {
 public:
  DeviceGuard(const Driver& driver, int device) : driver_(driver) {
    driver_.get_context(&before_);
    error_ = cudaSetDevice(device);
  }
  ~DeviceGuard() { driver_.set_context(before_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t error() const { return error_; }

 private:
  const Driver& driver_;
  void* before_ = nullptr;
  cudaError_t error_;
};

// While any thread captures a graph in the default mode, an allocation or a wait on another thread would end that
// capture with an error. Ours touch nothing that a capture could see.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() : error_(cudaThreadExchangeStreamCaptureMode(&mode_)) {}
  ~RelaxedCaptureMode() {
    if (error_ == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  cudaError_t error_;
};

}  // namespace otk::cuda
