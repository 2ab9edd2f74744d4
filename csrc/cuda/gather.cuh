// The content of a strided tensor as row-major bytes, by some of the threads of a block.
#pragma once

#include <stdint.h>
#include <string.h>

#include "request.h"

namespace otk::cuda {

constexpr uint32_t kInFlight = 4;  // loads that a thread starts before it uses the first

// One load or store of an aligned T.
template <class T>
__device__ T load(const void* p) {
  T value;
  memcpy(&value, __builtin_assume_aligned(p, sizeof(T)), sizeof(T));
  return value;
}

template <class T>
__device__ void store(void* p, const T& value) {
  memcpy(__builtin_assume_aligned(p, sizeof(T)), &value, sizeof(T));
}

struct alignas(16) Chunk {
  uint64_t words[2];
};
static_assert(sizeof(Chunk) == kMaxUnit);

// Where the unit at `index` lies, in bytes from the first. Loops are not unrolled where a copy would cost more than it
// saves: build time, and instructions that every launch fetches anew.
__device__ inline int64_t offset_of(const Request& request, uint32_t index) {
  int64_t offset = 0;
#pragma unroll 1
  for (uint32_t d = request.ndim - 1; d > 0; --d) {
    const uint32_t outer = index / request.shape[d];
    offset += int64_t{index - outer * request.shape[d]} * request.strides[d];
    index = outer;
  }
  return offset + int64_t{index} * request.strides[0];
}

template <class Unit>
__device__ void gather_units(const Request& request, uint32_t first, uint32_t count, uint32_t worker, uint32_t workers,
                             uint8_t* out) {
#pragma unroll 1
  for (uint32_t begin = worker; begin < count; begin += kInFlight * workers) {
    Unit units[kInFlight] = {};
    for (uint32_t j = 0; j < kInFlight; ++j) {
      const uint32_t i = begin + j * workers;
      if (i < count) units[j] = load<Unit>(request.source + offset_of(request, first + i));
    }
    for (uint32_t j = 0; j < kInFlight; ++j) {
      const uint32_t i = begin + j * workers;
      if (i < count) store(out + sizeof(Unit) * i, units[j]);
    }
  }
}

// Brings `size` bytes of row-major content to `out`, and zeros up to a multiple of kMaxUnit. `start` is one as well.
__device__ inline void gather(const Request& request, uint64_t start, uint32_t size, uint32_t worker, uint32_t workers,
                              uint8_t* out) {
  const auto first = static_cast<uint32_t>(start / request.unit);
  const uint32_t count = size / request.unit;
  switch (request.unit) {
    case 1:
      gather_units<uint8_t>(request, first, count, worker, workers, out);
      break;
    case 2:
      gather_units<uint16_t>(request, first, count, worker, workers, out);
      break;
    case 4:
      gather_units<uint32_t>(request, first, count, worker, workers, out);
      break;
    case 8:
      gather_units<uint64_t>(request, first, count, worker, workers, out);
      break;
    default:
      gather_units<Chunk>(request, first, count, worker, workers, out);
  }
  // What is no whole unit comes only at the end of contiguous content; zeros follow it.
  const uint32_t padded = (size + kMaxUnit - 1) / kMaxUnit * kMaxUnit;
#pragma unroll 1
  for (uint32_t i = count * request.unit + worker; i < padded; i += workers) {
    out[i] = i < size ? request.source[start + i] : 0;
  }
}

}  // namespace otk::cuda
