// XXH3-128's accumulation loop for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

// Set before the shared headers: their functions are forced inline and must match the instruction set of this file.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#include "xxh3_dispatch.h"
#include "xxh3_long.h"

namespace otk::xxh3 {
namespace {

struct Vector {
  using Reg = __m256i;
  static constexpr size_t kWords = sizeof(Reg) / 8;
  static OTK_HD Reg load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static OTK_HD void store(void* p, Reg r) { _mm256_storeu_si256(static_cast<__m256i*>(p), r); }
  static OTK_HD Reg add(Reg x, Reg y) { return _mm256_add_epi64(x, y); }
  static OTK_HD Reg bit_xor(Reg x, Reg y) { return _mm256_xor_si256(x, y); }
  static OTK_HD Reg swap_pairs(Reg x) { return _mm256_shuffle_epi32(x, 0x4E); }
  static OTK_HD Reg multiply_halves(Reg x) { return _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)); }
  static OTK_HD Reg multiply_prime(Reg x) {
    const Reg prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32_1));
    const Reg high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
  }
  static OTK_HD Reg shift_right_47(Reg x) { return _mm256_srli_epi64(x, 47); }
};

}  // namespace

void run_avx2(uint64_t (&acc)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  LongLoop<Vector>::run(acc, p, n, copy);
}

}  // namespace otk::xxh3

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
