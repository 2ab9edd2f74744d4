// XXH3-128's accumulation loop for SSE2, which every x86-64 CPU has.
#if defined(__x86_64__)
#include <immintrin.h>

#include "xxh3_dispatch.h"
#include "xxh3_long.h"

namespace otk::xxh3 {
namespace {

struct Vector {
  using Reg = __m128i;
  static constexpr size_t kWords = sizeof(Reg) / 8;
  static OTK_HD Reg load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static OTK_HD void store(void* p, Reg r) { _mm_storeu_si128(static_cast<__m128i*>(p), r); }
  static OTK_HD Reg add(Reg x, Reg y) { return _mm_add_epi64(x, y); }
  static OTK_HD Reg bit_xor(Reg x, Reg y) { return _mm_xor_si128(x, y); }
  static OTK_HD Reg swap_pairs(Reg x) { return _mm_shuffle_epi32(x, 0x4E); }
  static OTK_HD Reg multiply_halves(Reg x) { return _mm_mul_epu32(x, _mm_srli_epi64(x, 32)); }
  static OTK_HD Reg multiply_prime(Reg x) {
    const Reg prime = _mm_set1_epi64x(static_cast<int64_t>(kPrime32_1));
    const Reg high = _mm_mul_epu32(_mm_srli_epi64(x, 32), prime);
    return _mm_add_epi64(_mm_mul_epu32(x, prime), _mm_slli_epi64(high, 32));
  }
  static OTK_HD Reg shift_right_47(Reg x) { return _mm_srli_epi64(x, 47); }
};

}  // namespace

void run_sse2(uint64_t (&acc)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  LongLoop<Vector>::run(acc, p, n, copy);
}

}  // namespace otk::xxh3

#endif  // __x86_64__
