// A CUDA runtime of two devices that are this host's threads and memory. What is launched runs when its stream is
// waited for, and not before: who reads earlier, reads nothing. Every call is counted and can be made to fail.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../csrc/cuda/kernel.h"
#include "../../../csrc/cuda/phases.h"

using namespace otk::cuda;

namespace {

constexpr int kDevices = 2;
constexpr uint32_t kThreads = 64;

using Queue = std::pair<int, cudaStream_t>;
struct Launch {
  Batch batch;
  uint32_t count;
};

std::mutex mutex;
std::mutex execution;  // a stream is waited for until all of it is done, whoever runs it
std::map<std::string, int> calls;
std::map<std::string, std::pair<int, int>> failures;  // call -> (calls that still succeed, error)
std::map<Queue, std::vector<Launch>> queues;
std::set<Queue> capturing;
std::set<int> contexts;
uint8_t poison = 0;  // the test device keeps its bytes XOR-ed with this
int wait_ms = 0;
bool wrong = false;                    // the kernel gathers another byte
thread_local void* context = nullptr;  // as the driver has it: none, or 1 + the device
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

int current_device() { return context == nullptr ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1; }

cudaError_t call(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++calls[name];
  const auto failure = failures.find(name);
  if (failure == failures.end() || failure->second.first-- > 0) return cudaSuccess;
  return static_cast<cudaError_t>(failure->second.second);
}

// A copy of what a request reads, decoded and as well aligned.
struct Decoded {
  explicit Decoded(Request& request) {
    int64_t low = 0;
    int64_t high = request.unit;
    for (uint32_t d = 0; d < request.ndim; ++d) {
      const int64_t reach = (int64_t{request.shape[d]} - 1) * request.strides[d];
      (reach < 0 ? low : high) += reach;
    }
    if (request.ndim == 1 && request.strides[0] == request.unit) high = static_cast<int64_t>(request.nbytes);
    const uint8_t* first = request.source + low;
    const size_t skip = reinterpret_cast<uintptr_t>(first) % 16;
    memory.reset(static_cast<uint8_t*>(aligned_alloc(16, (skip + high - low + 15) / 16 * 16)), &free);
    for (int64_t i = 0; i < high - low; ++i) memory.get()[skip + i] = first[i] ^ poison;
    request.source = memory.get() + skip - low;
  }
  std::shared_ptr<uint8_t> memory;
};

void run(const Launch& launch) {
  for (uint32_t i = 0; i < launch.count; ++i) {
    Request request = launch.batch.requests[i];
    const Decoded decoded(request);
    const auto shared = std::make_unique<Shared>();
    for (uint32_t phase = 0; phase < phase_count(request); ++phase) {
      for (uint32_t thread = 0; thread < kThreads; ++thread) run_phase(request, phase, thread, kThreads, *shared);
    }
    if (wrong && request.unit == 1) request.content[request.nbytes - 1] ^= 1;
  }
}

int get_context(void** current) {
  *current = context;
  return 0;
}

int set_context(void* wanted) {
  context = wanted;
  return 0;
}

}  // namespace

cudaError_t otk::cuda::launch_batch(const Batch& batch, uint32_t count, cudaStream_t stream) {
  const cudaError_t error = call("launch");
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  queues[{current_device(), stream}].push_back({batch, count});
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return call("cudaGetDeviceCount");
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = call("cudaSetDevice")) return error;
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  context = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
  const std::lock_guard<std::mutex> lock(mutex);
  contexts.insert(device);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) {
  if (capture_mode != cudaStreamCaptureModeRelaxed) return cudaErrorInvalidValue;
  if (const cudaError_t error = call("cudaHostAlloc")) return error;
  *memory = aligned_alloc(4096, size);
  memset(*memory, 0xEE, size);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  free(memory);
  return call("cudaFreeHost");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (const cudaError_t error = call("cudaStreamIsCapturing")) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const bool active = capturing.count({current_device(), stream}) > 0;
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (capture_mode != cudaStreamCaptureModeRelaxed) return cudaErrorInvalidValue;
  if (const cudaError_t error = call("cudaStreamSynchronize")) return error;
  std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
  const std::lock_guard<std::mutex> one_at_a_time(execution);
  std::vector<Launch> launches;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    launches.swap(queues[{current_device(), stream}]);
  }
  for (const Launch& launch : launches) run(launch);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return call("cudaThreadExchangeStreamCaptureMode");
}

cudaError_t cudaGetLastError() { return call("cudaGetLastError"); }

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheFake"; }

const char* cudaGetErrorString(cudaError_t) { return "an error of the fake"; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (strcmp(symbol, "cuCtxGetCurrent") == 0) *function = reinterpret_cast<void*>(&get_context);
  if (strcmp(symbol, "cuCtxSetCurrent") == 0) *function = reinterpret_cast<void*>(&set_context);
  *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return call("cudaGetDriverEntryPointByVersion");
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
  failures.clear();
  capturing.clear();
  contexts.clear();
}

EXPORT void fake_fail(const char* name, int successes, int error) { failures[name] = {successes, error}; }

EXPORT void fake_capture(int device, void* stream) { capturing.insert({device, static_cast<cudaStream_t>(stream)}); }

EXPORT int fake_has_context(int device) { return static_cast<int>(contexts.count(device)); }

// -1 for a thread without a context.
EXPORT int fake_current_device() { return context == nullptr ? -1 : current_device(); }

EXPORT void fake_set_current_device(int device) {
  context = reinterpret_cast<void*>(static_cast<uintptr_t>(device + 1));
}

EXPORT int fake_capture_mode() { return capture_mode; }

EXPORT void fake_poison(int byte) { poison = static_cast<uint8_t>(byte); }

EXPORT void fake_be_wrong() { wrong = true; }

EXPORT void fake_wait_ms(int milliseconds) { wait_ms = milliseconds; }
