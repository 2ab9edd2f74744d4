// The content hash for each instruction set, and the choice among them at run time.
#if defined(__GNUC__) && !defined(__clang__)
// GCC before 13 warns of its own _mm512_undefined_epi32 (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xxh3_dispatch.h"

// Everything between the two may use an instruction set that the rest of the program may not.
#define OTK_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define OTK_BEGIN_TARGET(isa) OTK_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define OTK_END_TARGET _Pragma("clang attribute pop")
#else
#define OTK_BEGIN_TARGET(isa) _Pragma("GCC push_options") OTK_PRAGMA(GCC target(isa))
#define OTK_END_TARGET _Pragma("GCC pop_options")
#endif

namespace otk::xxh3 {
namespace {

namespace scalar {
// No vector type: compilers would use the vector unit.
struct Reg {
  uint64_t a;
  uint64_t b;
};
OTK_HD Reg operator+(Reg x, uint64_t y) { return {x.a + y, x.b + y}; }
OTK_HD Reg operator+(Reg x, Reg y) { return {x.a + y.a, x.b + y.b}; }
OTK_HD Reg& operator+=(Reg& x, Reg y) { return x = x + y; }
OTK_HD Reg operator^(Reg x, Reg y) { return {x.a ^ y.a, x.b ^ y.b}; }
OTK_HD Reg operator>>(Reg x, int n) { return {x.a >> n, x.b >> n}; }
OTK_HD Reg operator<<(Reg x, int n) { return {x.a << n, x.b << n}; }
OTK_HD uint64_t low32(uint64_t x) { return static_cast<uint32_t>(x); }
OTK_HD Reg multiply32(Reg x, Reg y) { return {low32(x.a) * low32(y.a), low32(x.b) * low32(y.b)}; }
OTK_HD Reg swap_pairs(Reg x) { return {x.b, x.a}; }
#include "xxh3_long.h"
}  // namespace scalar

#if defined(__x86_64__)
namespace sse2 {  // part of x86-64
typedef uint64_t Reg __attribute__((vector_size(16)));
OTK_HD Reg multiply32(Reg x, Reg y) { return (Reg)_mm_mul_epu32((__m128i)x, (__m128i)y); }
OTK_HD Reg swap_pairs(Reg x) { return (Reg)_mm_shuffle_epi32((__m128i)x, 0x4E); }
#include "xxh3_long.h"
}  // namespace sse2

OTK_BEGIN_TARGET("avx2")
namespace avx2 {
typedef uint64_t Reg __attribute__((vector_size(32)));
OTK_HD Reg multiply32(Reg x, Reg y) { return (Reg)_mm256_mul_epu32((__m256i)x, (__m256i)y); }
OTK_HD Reg swap_pairs(Reg x) { return (Reg)_mm256_shuffle_epi32((__m256i)x, 0x4E); }
#include "xxh3_long.h"
}  // namespace avx2
OTK_END_TARGET

OTK_BEGIN_TARGET("avx512f")
namespace avx512 {
typedef uint64_t Reg __attribute__((vector_size(64)));
OTK_HD Reg multiply32(Reg x, Reg y) { return (Reg)_mm512_mul_epu32((__m512i)x, (__m512i)y); }
OTK_HD Reg swap_pairs(Reg x) { return (Reg)_mm512_shuffle_epi32((__m512i)x, static_cast<_MM_PERM_ENUM>(0x4E)); }
#include "xxh3_long.h"
}  // namespace avx512
OTK_END_TARGET

#elif defined(__aarch64__)
namespace neon {  // part of AArch64
typedef uint64_t Reg __attribute__((vector_size(16)));
OTK_HD Reg multiply32(Reg x, Reg y) { return (Reg)vmull_u32(vmovn_u64((uint64x2_t)x), vmovn_u64((uint64x2_t)y)); }
OTK_HD Reg swap_pairs(Reg x) { return (Reg)vextq_u64((uint64x2_t)x, (uint64x2_t)x, 1); }
#include "xxh3_long.h"
}  // namespace neon
#endif

SimdPaths find_paths() {
  SimdPaths found{};
  const auto add = [&found](const char* name, LongLoopFn run) { found.path[found.count++] = {name, run}; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) add("avx512", avx512::run);
  if (__builtin_cpu_supports("avx2")) add("avx2", avx2::run);
  add("sse2", sse2::run);
#elif defined(__aarch64__)
  add("neon", neon::run);
#endif
  add("scalar", scalar::run);
  return found;
}

}  // namespace

const SimdPaths& simd_paths() {
  static const SimdPaths paths = find_paths();
  return paths;
}

Digest hash(const void* data, size_t n, LongLoopFn loop) {
  const auto* p = static_cast<const uint8_t*>(data);
  if (n <= kMidMax) return hash_short(p, n);
  uint64_t acc[kLanes];
  loop(acc, p, n, nullptr);
  return finish(acc, n);
}

Digest copy_and_hash(uint8_t* copy, const void* data, size_t n, LongLoopFn loop) {
  if (n <= kMidMax) {
    if (n > 0) memcpy(copy, data, n);
    return hash_short(copy, n);
  }
  uint64_t acc[kLanes];
  loop(acc, static_cast<const uint8_t*>(data), n, copy);
  return finish(acc, n);
}

}  // namespace otk::xxh3
