// A CUDA runtime of two devices that are this host's threads and memory. What is launched runs when its stream is
// waited for, and not before: who reads earlier, reads nothing. Every call is counted, and can be made slow or to fail.
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake.h"

namespace {

constexpr int kDevices = 2;

using Queue = std::pair<int, cudaStream_t>;

std::mutex mutex;
std::mutex execution;  // a stream is waited for until all of it is done, whoever runs it
std::map<std::string, int> calls;
std::map<std::string, int> delays;                    // call -> ms
std::map<std::string, std::pair<int, int>> failures;  // call -> (calls that still succeed, error)
std::map<Queue, std::vector<std::function<void()>>> queues;
std::map<uint64_t, uint64_t> pinned;  // begin -> end
std::set<Queue> capturing;
std::set<int> contexts;
std::string error_text = "an error of the fake";
thread_local void* context = nullptr;  // as the driver has it: none, or 1 + the device
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

void make_current(int device) {
  context = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
  const std::lock_guard<std::mutex> lock(mutex);
  contexts.insert(device);
}

int current_device() { return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1; }

int get_context(void** current) {
  *current = context;
  return 0;
}

int set_context(void* wanted) {
  context = wanted;
  return 0;
}

// A call that ends the captures of other threads in every mode but the relaxed one.
cudaError_t unsafe_call(const char* name) {
  fake::use_context();
  const cudaError_t error = fake::call(name);
  return capture_mode == cudaStreamCaptureModeRelaxed ? error : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t fake::call(const char* name) {
  int delay;
  cudaError_t error = cudaSuccess;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ++calls[name];
    delay = delays[name];
    const auto failure = failures.find(name);
    if (failure != failures.end() && failure->second.first-- <= 0) {
      error = static_cast<cudaError_t>(failure->second.second);
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  return error;
}

void fake::use_context() {
  if (context == nullptr) make_current(0);
}

cudaError_t fake::enqueue(cudaStream_t stream, std::function<void()> work) {
  use_context();
  const cudaError_t error = call("launch");
  const std::lock_guard<std::mutex> lock(mutex);
  if (error == cudaSuccess) queues[{current_device(), stream}].push_back(std::move(work));
  return error;
}

uint64_t fake::pinned_end(uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto after = pinned.upper_bound(address);
  return after == pinned.begin() || std::prev(after)->second <= address ? 0 : std::prev(after)->second;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return fake::call("cudaGetDeviceCount");
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = fake::call("cudaSetDevice")) return error;
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  make_current(device);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) {
  if (const cudaError_t error = unsafe_call("cudaHostAlloc")) return error;
  *memory = aligned_alloc(4096, size);
  memset(*memory, 0xEE, size);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto begin = reinterpret_cast<uint64_t>(*memory);
  pinned[begin] = begin + size;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  free(memory);
  return unsafe_call("cudaFreeHost");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  fake::use_context();
  if (const cudaError_t error = fake::call("cudaStreamIsCapturing")) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const bool active = capturing.count({current_device(), stream}) > 0;
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = unsafe_call("cudaStreamSynchronize")) return error;
  const std::lock_guard<std::mutex> one_at_a_time(execution);
  std::vector<std::function<void()>> queue;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    queue.swap(queues[{current_device(), stream}]);
  }
  try {
    for (const auto& work : queue) work();
    return cudaSuccess;
  } catch (const std::runtime_error& error) {
    error_text = error.what();
    return cudaErrorIllegalAddress;
  }
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  fake::use_context();
  if (const cudaError_t error = fake::call("cudaThreadExchangeStreamCaptureMode")) return error;
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return fake::call("cudaGetLastError"); }

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheFake"; }

const char* cudaGetErrorString(cudaError_t) { return error_text.c_str(); }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (strcmp(symbol, "cuCtxGetCurrent") == 0) *function = reinterpret_cast<void*>(&get_context);
  if (strcmp(symbol, "cuCtxSetCurrent") == 0) *function = reinterpret_cast<void*>(&set_context);
  *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return fake::call("cudaGetDriverEntryPointByVersion");
}

// For ctypes.
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int fake_calls(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  return calls[name];
}

EXPORT void fake_reset() {
  const std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
  delays.clear();
  failures.clear();
  capturing.clear();
}

EXPORT void fake_fail(const char* name, int successes, int error) { failures[name] = {successes, error}; }

EXPORT void fake_delay(const char* name, int milliseconds) { delays[name] = milliseconds; }

EXPORT void fake_capture(int device, void* stream) { capturing.insert({device, static_cast<cudaStream_t>(stream)}); }

EXPORT int fake_has_context(int device) { return static_cast<int>(contexts.count(device)); }

// -1 for a thread without a context.
EXPORT int fake_current_device() { return current_device(); }

EXPORT void fake_set_current_device(int device) {
  context = reinterpret_cast<void*>(static_cast<uintptr_t>(device + 1));
}

EXPORT int fake_capture_mode() { return capture_mode; }
