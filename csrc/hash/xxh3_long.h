// The accumulation loop of XXH3-128 for inputs over 240 bytes, once for all vector widths. A `Vector` supplies the five
// operations below on its registers; the file that includes this header has chosen the instruction set.
#pragma once

#include "xxh3.h"

namespace otk::xxh3 {

// struct Vector {
//   using Reg;                             // kWords 64-bit lanes
//   static constexpr size_t kWords;
//   static Reg load(const void*);          // unaligned
//   static void store(void*, Reg);
//   static Reg add(Reg, Reg);
//   static Reg bit_xor(Reg, Reg);
//   static Reg swap_pairs(Reg);            // lane i <-> lane i ^ 1
//   static Reg multiply_halves(Reg);       // low 32 bits * high 32 bits of each lane
//   static Reg multiply_prime(Reg);        // each lane * kPrime32_1
//   static Reg shift_right_47(Reg);
// };
template <class Vector>
struct LongLoop {
  using Reg = typename Vector::Reg;
  static constexpr size_t kRegs = kLanes / Vector::kWords;

  // With kCopy, the stripe is also written to `copy`.
  template <bool kCopy>
  static OTK_HD void accumulate(Reg (&acc)[kRegs], const uint8_t* p, const uint8_t* s, uint8_t* copy) {
#pragma GCC unroll 8
    for (size_t r = 0; r < kRegs; ++r) {
      const Reg data = Vector::load(p + 8 * Vector::kWords * r);
      if (kCopy) Vector::store(copy + 8 * Vector::kWords * r, data);
      const Reg key = Vector::bit_xor(data, Vector::load(s + 8 * Vector::kWords * r));
      acc[r] = Vector::add(acc[r], Vector::add(Vector::swap_pairs(data), Vector::multiply_halves(key)));
    }
  }

  static OTK_HD void scramble(Reg (&acc)[kRegs]) {
    const uint8_t* s = secret() + kScrambleSecret;
#pragma GCC unroll 8
    for (size_t r = 0; r < kRegs; ++r) {
      const Reg mixed = Vector::bit_xor(acc[r], Vector::shift_right_47(acc[r]));
      acc[r] = Vector::multiply_prime(Vector::bit_xor(mixed, Vector::load(s + 8 * Vector::kWords * r)));
    }
  }

  template <bool kCopy>
  static OTK_HD void run_as(uint64_t (&out)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
    initialize(out);
    Reg acc[kRegs];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRegs; ++r) acc[r] = Vector::load(out + Vector::kWords * r);
    const uint8_t* const end = p + n;
    for (size_t blocks = (n - 1) / kBlock; blocks > 0; --blocks, p += kBlock, copy += kCopy ? kBlock : 0) {
      // Unrolled in full, GCC runs out of registers and is a quarter slower.
#pragma GCC unroll 4
      for (size_t i = 0; i < kStripesPerBlock; ++i) {
        accumulate<kCopy>(acc, p + kStripe * i, secret() + 8 * i, copy + (kCopy ? kStripe * i : 0));
      }
      scramble(acc);
    }
    // The rest is 1 to 1,024 bytes; its last stripe, whole or not, is replaced by the input's last 64 bytes.
    const uint8_t* s = secret();
    for (; p + kStripe < end; p += kStripe, s += 8, copy += kCopy ? kStripe : 0) accumulate<kCopy>(acc, p, s, copy);
    const size_t rest = static_cast<size_t>(end - p);
    if (kCopy) memcpy(copy, p, rest);
    // Of the copy: the digest is that of the bytes that are kept, whatever happens to the input meanwhile.
    const uint8_t* const last = (kCopy ? copy + rest : end) - kStripe;
    accumulate<false>(acc, last, secret() + kLastStripeSecret, nullptr);
#pragma GCC unroll 8
    for (size_t r = 0; r < kRegs; ++r) Vector::store(out + Vector::kWords * r, acc[r]);
  }

  static OTK_HD void run(uint64_t (&out)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
    if (copy == nullptr) {
      run_as<false>(out, p, n, nullptr);
    } else {
      run_as<true>(out, p, n, copy);
    }
  }
};

}  // namespace otk::xxh3
