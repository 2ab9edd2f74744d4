// XXH3-128's accumulation loop for NEON, which every AArch64 CPU has.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "xxh3_dispatch.h"
#include "xxh3_long.h"

namespace otk::xxh3 {
namespace {

struct Vector {
  using Reg = uint64x2_t;
  static constexpr size_t kWords = 2;
  static OTK_HD Reg load(const void* p) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
  static OTK_HD void store(void* p, Reg r) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u64(r)); }
  static OTK_HD Reg add(Reg x, Reg y) { return vaddq_u64(x, y); }
  static OTK_HD Reg bit_xor(Reg x, Reg y) { return veorq_u64(x, y); }
  static OTK_HD Reg swap_pairs(Reg x) { return vextq_u64(x, x, 1); }
  static OTK_HD Reg multiply_halves(Reg x) { return vmull_u32(vmovn_u64(x), vshrn_n_u64(x, 32)); }
  static OTK_HD Reg multiply_prime(Reg x) {
    const uint32x2_t prime = vdup_n_u32(static_cast<uint32_t>(kPrime32_1));
    const Reg high = vshlq_n_u64(vmull_u32(vshrn_n_u64(x, 32), prime), 32);
    return vmlal_u32(high, vmovn_u64(x), prime);
  }
  static OTK_HD Reg shift_right_47(Reg x) { return vshrq_n_u64(x, 47); }
};

}  // namespace

void run_neon(uint64_t (&acc)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  LongLoop<Vector>::run(acc, p, n, copy);
}

}  // namespace otk::xxh3

#endif  // __aarch64__
