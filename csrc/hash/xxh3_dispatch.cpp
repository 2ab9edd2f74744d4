#include "xxh3_dispatch.h"

#include "xxh3_long.h"

namespace otk::xxh3 {
namespace {

struct Scalar {
  struct Reg {
    uint64_t a;
    uint64_t b;
  };
  static constexpr size_t kWords = 2;
  static OTK_HD Reg load(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    return {read64(bytes), read64(bytes + 8)};
  }
  static OTK_HD void store(void* p, Reg r) { memcpy(p, &r, sizeof r); }
  static OTK_HD Reg add(Reg x, Reg y) { return {x.a + y.a, x.b + y.b}; }
  static OTK_HD Reg bit_xor(Reg x, Reg y) { return {x.a ^ y.a, x.b ^ y.b}; }
  static OTK_HD Reg swap_pairs(Reg x) { return {x.b, x.a}; }
  static OTK_HD Reg multiply_halves(Reg x) {
    return {uint64_t{static_cast<uint32_t>(x.a)} * (x.a >> 32), uint64_t{static_cast<uint32_t>(x.b)} * (x.b >> 32)};
  }
  static OTK_HD Reg multiply_prime(Reg x) { return {x.a * kPrime32_1, x.b * kPrime32_1}; }
  static OTK_HD Reg shift_right_47(Reg x) { return {x.a >> 47, x.b >> 47}; }
};

void run_scalar(uint64_t (&acc)[kLanes], const uint8_t* p, size_t n, uint8_t* copy) {
  LongLoop<Scalar>::run(acc, p, n, copy);
}

SimdPaths find_paths() {
  SimdPaths found{};
  const auto add = [&found](const char* name, LongLoopFn run) { found.path[found.count++] = {name, run}; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) add("avx512", run_avx512);
  if (__builtin_cpu_supports("avx2")) add("avx2", run_avx2);
  add("sse2", run_sse2);  // part of x86-64
#elif defined(__aarch64__)
  add("neon", run_neon);  // part of AArch64
#endif
  add("scalar", run_scalar);
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
