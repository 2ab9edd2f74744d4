// Runs translated PTX in place of a GPU, below the stand-in runtime and behind what nvcc's host code links against.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../fake_runtime/fake.h"

struct dim3 {
  unsigned x, y, z;
};

namespace ptx {
namespace {

constexpr uint32_t kMany = ~0u;

// The threads that last wrote and read a byte of shared memory, and between which barriers. Epochs never come again.
struct Access {
  uint64_t written = 0, read = 0;
  uint32_t writer = 0, reader = 0;
};

struct Source {
  uint64_t end;
  const uint8_t* bytes;
};

std::map<uint64_t, Source> sources;             // what the kernel may read, by its address on the device
std::map<uint64_t, std::vector<bool>> written;  // by the end of the pinned memory
std::vector<uint8_t> shared_memory, parameters;
std::vector<Access> accesses;
uint64_t epoch = 0, block_epoch = 0;
uint64_t order = 0;  // of the threads: 0 forward, 1 reverse, else the seed of a random one

std::vector<bool>::reference written_at(uint64_t address, uint64_t end) {
  std::vector<bool>& bytes = written[end];
  if (bytes.size() < end - address) bytes.resize(end - address);
  return bytes[end - address - 1];
}

uint8_t* in_shared(Thread& t, uint64_t address, uint32_t size, bool write) {
  if (address < kSharedStart || address + size > kSharedStart + kSharedSize) {
    fail(t, "shared memory out of bounds", address, size);
  }
  for (uint64_t at = address - kSharedStart; at < address - kSharedStart + size; ++at) {
    Access& byte = accesses[at];
    if (!write && byte.written < block_epoch) fail(t, "uninitialized shared memory", address, size);
    if (byte.written == epoch && byte.writer != t.index) fail(t, "race with a write", address, size);
    if (write) {
      if (byte.read == epoch && byte.reader != t.index) fail(t, "race with a read", address, size);
      byte.written = epoch;
      byte.writer = t.index;
    } else {
      byte.reader = byte.read == epoch && byte.reader != t.index ? kMany : t.index;
      byte.read = epoch;
    }
  }
  return shared_memory.data() + (address - kSharedStart);
}

uint8_t* in_global(Thread& t, uint64_t address, uint32_t size, bool write) {
  if (write) {
    const uint64_t end = fake::pinned_end(address);
    if (end < address + size) fail(t, "write out of bounds", address, size);
    for (uint64_t at = address; at < address + size; ++at) {
      if (written_at(at, end)) fail(t, "second write", address, size);
      written_at(at, end) = true;
    }
    return reinterpret_cast<uint8_t*>(address);
  }
  auto source = sources.upper_bound(address);
  if (source == sources.begin() || address + size > (--source)->second.end) {
    fail(t, "read out of bounds", address, size);
  }
  return const_cast<uint8_t*>(source->second.bytes) + (address - source->first);
}

uint8_t* in_constants(Thread& t, const uint8_t* bytes, uint64_t at, uint64_t end, uint32_t size, bool write) {
  if (write || at + size < at || at + size > end) fail(t, "constants or parameters out of bounds", at, size);
  return const_cast<uint8_t*>(bytes) + at;
}

void run_block(dim3 grid, dim3 block, uint32_t number) {
  const std::unique_ptr<uint8_t, decltype(&free)> memory(
      static_cast<uint8_t*>(aligned_alloc(64, (kThreadSize * block.x + 63) / 64 * 64)), &free);
  memset(memory.get(), 0xC3, kThreadSize * block.x);  // registers begin with anything
  const auto thread = [&](uint32_t i) -> Thread& { return *reinterpret_cast<Thread*>(memory.get() + i * kThreadSize); };
  for (uint32_t i = 0; i < block.x; ++i) {
    thread(i) = {0, i, {i, 0, 0}, {block.x, block.y, block.z}, {number, 0, 0}, {grid.x, grid.y, grid.z}, 0};
  }
  std::vector<uint32_t> turns(block.x);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  std::mt19937_64 random(order + number);
  for (block_epoch = ++epoch;; ++epoch) {
    if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
    for (const uint32_t turn : turns) run_to_barrier(thread(turn));
    for (uint32_t i = 0; i < block.x; ++i) {
      if (thread(i).resume != thread(0).resume) fail(thread(i), "not at the barrier of the others");
    }
    if (thread(0).resume == kDone) return;
  }
}

// Used before this file's objects are made.
std::map<const void*, std::string>& kernels() {
  static auto* const map = new std::map<const void*, std::string>;
  return *map;
}

}  // namespace

void fail(const Thread& t, const char* what, uint64_t address, uint32_t size) {
  char text[200];
  snprintf(text, sizeof text, "block %u, thread %u: %s (%u bytes at %#llx)", t.ctaid[0], t.tid[0], what, size,
           static_cast<unsigned long long>(address));
  throw std::runtime_error(text);
}

uint8_t* reach(Thread& t, Space space, uint64_t address, uint32_t size, bool write) {
  if (space == Space::Generic) {
    const uint64_t window = address >> 56 << 56;
    space = window == kSharedWindow  ? Space::Shared
            : window == kConstWindow ? Space::Const
            : window == kParamWindow ? Space::Param
                                     : Space::Global;
    if (space != Space::Global) address -= window;
  }
  if (address % size != 0) fail(t, "misaligned access", address, size);
  switch (space) {
    case Space::Shared:
      return in_shared(t, address & 0xffffffff, size, write);
    case Space::Const:
      return in_constants(t, kConstants, address - kConstStart, kConstSize, size, write);
    case Space::Param:
      return in_constants(t, parameters.data(), address - kParamStart, kParamSize, size, write);
    default:
      return in_global(t, address, size, write);
  }
}

}  // namespace ptx

using namespace ptx;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
  kernels()[stub] = name;
}
// What <<<>>> would call; the launcher does not use it.
EXPORT cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) { abort(); }
EXPORT cudaError_t __cudaGetKernel(void**, const void*) { abort(); }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { abort(); }
EXPORT char __cudaInitModule(void**) { return 0; }

EXPORT cudaError_t cudaFuncGetAttributes(void*, const void* stub) {
  return kernels()[stub] == kKernel ? fake::call("load") : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_size,
                                    cudaStream_t stream) {
  const bool flat = grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1 && grid.x < 1u << 16;
  if (kernels()[stub] != kKernel || shared_size != 0 || !flat || block.x > kMaxThreads) return cudaErrorInvalidValue;
  const auto* first = static_cast<const uint8_t*>(arguments[0]);
  return fake::enqueue(stream, [grid, block, copy = std::vector<uint8_t>(first, first + kParamSize)] {
    parameters = copy;
    shared_memory.assign(kSharedSize, 0xA7);
    accesses.resize(kSharedSize);
    for (uint32_t number = 0; number < grid.x; ++number) run_block(grid, block, number);
  });
}

// For ctypes. Lets the kernel read `size` bytes at an address on the device.
EXPORT void ptx_add_source(uint64_t address, const uint8_t* bytes, uint64_t size) {
  sources[address] = {address + size, bytes};
}

EXPORT void ptx_reset() {
  sources.clear();
  written.clear();
}

EXPORT void ptx_set_order(uint64_t seed) { order = seed; }

// How many of these bytes of pinned memory were written.
EXPORT uint64_t ptx_written(uint64_t address, uint64_t size) {
  uint64_t count = 0;
  for (uint64_t at = address; at < address + size; ++at) count += written_at(at, fake::pinned_end(address));
  return count;
}
