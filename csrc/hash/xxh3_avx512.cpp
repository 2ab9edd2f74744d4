// XXH3-128's accumulation loop for AVX-512F.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC before 13 warns of its own _mm512_undefined_epi32 (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

// Set before the shared headers: their functions are forced inline and must match the instruction set of this file.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
#endif

#include "xxh3_dispatch.h"
#include "xxh3_long.h"

namespace otk::xxh3 {
namespace {

struct Vector {
  using Reg = __m512i;
  static constexpr size_t kWords = sizeof(Reg) / 8;
  static OTK_HD Reg load(const void* p) { return _mm512_loadu_si512(p); }
  static OTK_HD void store(void* p, Reg r) { _mm512_storeu_si512(p, r); }
  static OTK_HD Reg add(Reg x, Reg y) { return _mm512_add_epi64(x, y); }
  static OTK_HD Reg bit_xor(Reg x, Reg y) { return _mm512_xor_si512(x, y); }
  static OTK_HD Reg swap_pairs(Reg x) { return _mm512_shuffle_epi32(x, static_cast<_MM_PERM_ENUM>(0x4E)); }
  static OTK_HD Reg multiply_halves(Reg x) { return _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)); }
  static OTK_HD Reg multiply_prime(Reg x) {
    const Reg prime = _mm512_set1_epi64(static_cast<int64_t>(kPrime32_1));
    const Reg high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
  }
  static OTK_HD Reg shift_right_47(Reg x) { return _mm512_srli_epi64(x, 47); }
};

}  // namespace

void run_avx512(uint64_t (&acc)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  LongLoop<Vector>::run(acc, p, n, copy);
}

}  // namespace otk::xxh3

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
