#include "runtime.h"

#include <pthread.h>
#include <stdio.h>

#include <atomic>
#include <mutex>

namespace otk::cuda {
namespace {

std::mutex mutex;
std::atomic<bool> found{false};
std::atomic<bool> forked{false};    // in the child of a process that had used CUDA
cudaError_t missing = cudaSuccess;  // why there will never be a runtime
Driver functions;

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

// Errors that say the unit can never work here, while torch may: its runtime is another one.
bool is_unavailable(cudaError_t error) {
  switch (error) {
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorMemoryAllocation:
      return true;
    default:
      return false;
  }
}

const char* advice(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
      return "The driver is older than the CUDA runtime in this build; update it, or build with an older nvcc.";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "This build has no code for this GPU; build with an nvcc that knows it.";
    case cudaErrorMemoryAllocation:
      return "The device's memory or the pinned memory that this process may take (`ulimit -l`) is used up.";
    case cudaErrorNoDevice:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      return "";
    case cudaErrorInitializationError:
      return "If this process was forked from one that had used CUDA, start it with the spawn method instead.";
    default:
      return "Earlier asynchronous work on the device may be the cause; CUDA_LAUNCH_BLOCKING=1 shows where it was "
             "started.";
  }
}

}  // namespace

OtkCudaStatus report(cudaError_t error, const char* call, int device, OtkCudaText* text) {
  char where[32] = "";
  if (device >= 0) snprintf(where, sizeof where, " on cuda:%d", device);
  const char* hint = advice(error);
  snprintf(text->text, sizeof text->text, "omni_tensor_key: %s failed%s: %s (%s).%s%s", call, where,
           cudaGetErrorString(error), cudaGetErrorName(error), *hint == '\0' ? "" : " ", hint);
  cudaGetLastError();  // told now: the next call must not find it
  return is_unavailable(error) ? OTK_CUDA_UNAVAILABLE : OTK_CUDA_FAILED;
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
    if (error == cudaSuccess) error = find_function("cuCtxGetCurrent", functions.get_context);
    if (error == cudaSuccess) error = find_function("cuCtxSetCurrent", functions.set_context);
    if (error == cudaSuccess && pthread_atfork(nullptr, nullptr, note_fork) != 0) error = cudaErrorMemoryAllocation;
    if (error == cudaSuccess) {
      found.store(true, std::memory_order_release);
      return OTK_CUDA_OK;
    }
    if (!is_unavailable(error) || error == cudaErrorMemoryAllocation)
      return report(error, "initializing CUDA", -1, text);
    missing = error;
  }
  return report(missing, "initializing CUDA", -1, text);
}

const Driver& driver() { return functions; }

}  // namespace otk::cuda
