// What translated PTX runs on: memory that checks every access, and the instructions that C++ has no operator for.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace ptx {

// Where each space begins in generic addresses, and in addresses of its own; none has a byte at 0.
constexpr uint64_t kSharedWindow = 0x7100000000000000, kConstWindow = 0x7200000000000000;
constexpr uint64_t kParamWindow = 0x7300000000000000, kGlobalWindow = 0;
constexpr uint64_t kSharedStart = 1024, kConstStart = 256, kParamStart = 352;
constexpr uint32_t kDone = ~0u;
constexpr uint64_t kMaxJumps = 10'000'000;

enum class Space { Global, Shared, Const, Param, Generic };

// A CUDA thread. The registers come behind it.
struct Thread {
  uint32_t resume;  // the barrier at which it waits; 0 at its beginning
  uint32_t index;
  uint32_t tid[3], ntid[3], ctaid[3], nctaid[3];
  uint64_t jumps;
};

[[noreturn]] void fail(const Thread& thread, const char* what, uint64_t address = 0, uint32_t size = 0);

// The host's memory behind `size` bytes. Fails where they are out of bounds, misaligned, not initialized, or shared by
// two threads without a barrier in between.
uint8_t* reach(Thread& thread, Space space, uint64_t address, uint32_t size, bool write);

template <class T>
T get(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void put(uint8_t* to, T value) {
  memcpy(to, &value, sizeof value);
}

template <class T>
T nonzero(const Thread& thread, T divisor) {
  if (divisor == 0) fail(thread, "division by zero");
  return divisor;
}

template <class T>
unsigned __int128 product(T a, T b) {
  return static_cast<unsigned __int128>(static_cast<__int128>(a) * static_cast<__int128>(b));
}
template <>
inline unsigned __int128 product(uint64_t a, uint64_t b) {
  return static_cast<unsigned __int128>(a) * b;
}

template <class T>
T shl(T a, uint32_t count) {
  return count >= 8 * sizeof(T) ? T(0) : T(uint64_t(a) << count);
}

template <class T>
T shr(T a, uint32_t count) {
  return T(a >> std::min<uint32_t>(count, 8 * sizeof(T) - 1) >> (count >= 8 * sizeof(T) ? 1 : 0));
}

template <class T>
T bfi(T field, T into, uint32_t position, uint32_t length) {
  for (uint32_t i = 0; i < (length & 255) && (position & 255) + i < 8 * sizeof(T); ++i) {
    const T bit = T(1) << ((position & 255) + i);
    into = T((into & ~bit) | ((i < 8 * sizeof(T) ? field >> i : 0) & 1 ? bit : 0));
  }
  return into;
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15;
    const auto byte = static_cast<uint8_t>(bytes >> (8 * (selector & 7)));
    const uint8_t sign = byte & 128 ? 255 : 0;
    out |= uint32_t{selector & 8 ? sign : byte} << (8 * i);
  }
  return out;
}

inline uint32_t shf_l(uint32_t a, uint32_t b, uint32_t count) {
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) << (count & 31) >> 32);
}

inline uint32_t shf_r(uint32_t a, uint32_t b, uint32_t count) {
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> (count & 31));
}

// Of the translated kernel.
extern const uint8_t kConstants[];
extern const uint64_t kConstSize, kSharedSize, kParamSize;
extern const char* const kKernel;
extern const uint32_t kMaxThreads;
extern const size_t kThreadSize;
void run_to_barrier(Thread& thread);

}  // namespace ptx
