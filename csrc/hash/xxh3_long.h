// The accumulation loop of XXH3-128 for inputs over 240 bytes, once for all vector widths. xxh3_dispatch.cpp includes
// this file for each instruction set, in a namespace that has
//   Reg                  some 64-bit lanes
//   multiply32(x, y)     the product of the low 32 bits of each lane
//   swap_pairs(x)        lane i <-> lane i ^ 1

constexpr size_t kWords = sizeof(Reg) / 8;
constexpr size_t kRegs = kLanes / kWords;

OTK_HD Reg load(const void* p) {
  Reg r;
  memcpy(&r, p, sizeof r);
  return r;
}

// With kCopy, the stripe is also written to `copy`.
template <bool kCopy>
OTK_HD void accumulate(Reg (&acc)[kRegs], const uint8_t* p, const uint8_t* s, uint8_t* copy) {
#pragma GCC unroll 8
  for (size_t r = 0; r < kRegs; ++r) {
    const Reg data = load(p + sizeof(Reg) * r);
    if (kCopy) memcpy(copy + sizeof(Reg) * r, &data, sizeof data);
    const Reg key = data ^ load(s + sizeof(Reg) * r);
    acc[r] += swap_pairs(data) + multiply32(key, key >> 32);
  }
}

OTK_HD void scramble(Reg (&acc)[kRegs]) {
  const Reg prime = Reg{} + kPrime32_1;
#pragma GCC unroll 8
  for (size_t r = 0; r < kRegs; ++r) {
    const Reg x = acc[r] ^ (acc[r] >> 47) ^ load(secret() + kScrambleSecret + sizeof(Reg) * r);
    acc[r] = multiply32(x, prime) + (multiply32(x >> 32, prime) << 32);
  }
}

template <bool kCopy>
OTK_HD void run_as(uint64_t (&out)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  initialize(out);
  Reg acc[kRegs];
  memcpy(acc, out, sizeof acc);
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
  memcpy(out, acc, sizeof acc);
}

void run(uint64_t (&out)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  if (copy == nullptr) {
    run_as<false>(out, p, n, nullptr);
  } else {
    run_as<true>(out, p, n, copy);
  }
}
