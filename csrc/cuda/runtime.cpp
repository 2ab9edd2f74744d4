#include "runtime.h"

#include <pthread.h>
#include <stdio.h>

#include <atomic>
#include <mutex>

namespace otk::cuda {
namespace {

// Two functions of the driver, by their stable names. A CUcontext is a pointer, a CUresult an int.
int (*get_context)(void** context) = nullptr;
int (*set_context)(void* context) = nullptr;

constexpr int32_t kMaxDevices = 64;

std::mutex mutex;
std::atomic<bool> found{false};
std::atomic<bool> forked{false};             // in the child of a process that had used CUDA
cudaError_t missing = cudaSuccess;           // why there will never be a runtime
std::atomic<void*> contexts[kMaxDevices]{};  // the primary context of each prepared device

// The fork handler runs in the child, where another thread of the parent may have held the mutex: only a flag is set.
void note_fork() { forked.store(true, std::memory_order_relaxed); }

template <class Function>
cudaError_t find_function(const char* name, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  // Both functions are as old as CUDA 4.
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, 11000, cudaEnableDefault, &result);
#elif CUDART_VERSION >= 12000
  const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result);
#else
#error "omni_tensor_key needs nvcc 12.0 or newer"
#endif
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess || address == nullptr) return cudaErrorSymbolNotFound;
  function = reinterpret_cast<Function>(address);
  return cudaSuccess;
}

// What to do about an error of this kind; null for errors that say nothing of the unit, but of earlier work.
const char* advice(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
      return " The driver is older than the CUDA runtime in this build; update it, or build with an older nvcc.";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      return " This build has no code for this GPU; build with an nvcc that knows it.";
    case cudaErrorMemoryAllocation:
      return " The device's memory or the pinned memory that this process may take (`ulimit -l`) is used up.";
    default:
      return nullptr;
  }
}

}  // namespace

OtkCudaStatus status_of(cudaError_t error, const char* call, int device, OtkCudaText* text) {
  if (error == cudaSuccess) return OTK_CUDA_OK;
  char where[32] = "";
  if (device >= 0) snprintf(where, sizeof where, " on cuda:%d", device);
  const char* hint = advice(error);
  // Where the unit cannot work here, torch may: its runtime is another one.
  const bool unavailable = hint != nullptr || (device < 0 && error != cudaErrorInitializationError);
  if (error == cudaErrorInitializationError) {
    hint = " If this process was forked from one that had used CUDA, start it with the spawn method instead.";
  } else if (hint == nullptr) {
    hint = unavailable
               ? ""
               : " Earlier asynchronous work on the device may be the cause; CUDA_LAUNCH_BLOCKING=1 shows where "
                 "it was started.";
  }
  snprintf(text->text, sizeof text->text, "omni_tensor_key: %s failed%s: %s (%s).%s", call, where,
           cudaGetErrorString(error), cudaGetErrorName(error), hint);
  cudaGetLastError();  // told now: the next call must not find it
  return unavailable ? OTK_CUDA_UNAVAILABLE : OTK_CUDA_FAILED;
}

OtkCudaStatus find_runtime(OtkCudaText* text) {
  if (forked.load(std::memory_order_relaxed)) {
    snprintf(text->text, sizeof text->text,
             "omni_tensor_key: this process was forked from one that had already used CUDA, which CUDA does not "
             "support; start it with the spawn method instead.");
    return OTK_CUDA_FAILED;
  }
  if (found.load(std::memory_order_acquire)) return OTK_CUDA_OK;
  const std::lock_guard<std::mutex> lock(mutex);
  if (found.load(std::memory_order_relaxed)) return OTK_CUDA_OK;
  if (missing == cudaSuccess) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    if (error == cudaSuccess) error = find_function("cuCtxGetCurrent", get_context);
    if (error == cudaSuccess) error = find_function("cuCtxSetCurrent", set_context);
    if (error == cudaSuccess && pthread_atfork(nullptr, nullptr, note_fork) != 0) error = cudaErrorMemoryAllocation;
    if (error == cudaSuccess) found.store(true, std::memory_order_release);
    const OtkCudaStatus status = status_of(error, "initializing CUDA", -1, text);
    if (status == OTK_CUDA_UNAVAILABLE && error != cudaErrorMemoryAllocation) missing = error;
    return status;
  }
  return status_of(missing, "initializing CUDA", -1, text);
}

bool is_prepared(int32_t device) {
  return device >= 0 && device < kMaxDevices && contexts[device].load(std::memory_order_acquire) != nullptr &&
         !forked.load(std::memory_order_relaxed);
}

OtkCudaStatus note_prepared(int32_t device, OtkCudaText* text) {
  void* context = nullptr;
  get_context(&context);
  if (device < 0 || device >= kMaxDevices || context == nullptr) {
    return status_of(cudaErrorInvalidDevice, "preparing", device, text);
  }
  contexts[device].store(context, std::memory_order_release);
  return OTK_CUDA_OK;
}

}  // namespace otk::cuda

using namespace otk::cuda;

OtkCudaStatus otk_cuda_enter(int32_t device, OtkCudaScope* scope, OtkCudaText* text) {
  scope->context = nullptr;
  scope->mode = -1;
  get_context(&scope->context);
  // The context is put back by the driver's function: cudaSetDevice() would make device 0's context for a thread that
  // had none, and take some hundred MiB of a device that may be somebody else's.
  scope->changed = !is_prepared(device) || scope->context != contexts[device].load(std::memory_order_relaxed);
  OtkCudaStatus status = OTK_CUDA_OK;
  if (scope->changed) status = status_of(cudaSetDevice(device), "cudaSetDevice()", device, text);
  if (status != OTK_CUDA_OK) return status;
  // While any thread captures a graph in the default mode, an allocation or a wait on another thread would end that
  // capture with an error. Ours touch nothing that a capture could see. The exchange comes after the context: on a
  // thread that has none it would make device 0's as well.
  auto mode = cudaStreamCaptureModeRelaxed;
  const char* call = "cudaThreadExchangeStreamCaptureMode()";
  status = status_of(cudaThreadExchangeStreamCaptureMode(&mode), call, device, text);
  if (status == OTK_CUDA_OK) scope->mode = mode;
  return status;
}

void otk_cuda_leave(const OtkCudaScope* scope) {
  auto mode = static_cast<cudaStreamCaptureMode>(scope->mode);
  if (scope->mode >= 0) cudaThreadExchangeStreamCaptureMode(&mode);
  if (scope->changed) set_context(scope->context);
}
