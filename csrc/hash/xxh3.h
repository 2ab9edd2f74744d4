// XXH3-128 with seed 0 and the default secret, written from the published specification
// (xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Description"). One header for host and device: it knows pointers and
// sizes only, no Python and no DLPack.
//
// Every function is forced inline. That is not for speed: the SIMD translation units are compiled for newer CPUs than
// the rest, and an out-of-line copy of a shared inline function could be emitted from any of them and then run on a
// CPU that does not have its instructions.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define OTK_HD __host__ __device__ __forceinline__
#else
#define OTK_HD inline __attribute__((always_inline))
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the content hash reads words in little-endian order");

namespace otk::xxh3 {

struct Digest {
  uint64_t low;
  uint64_t high;
};

// A digest as it is stored and shown: big-endian, high half first.
struct Canonical {
  uint8_t bytes[16];
};

constexpr size_t kSecretSize = 192;
constexpr size_t kStripe = 64;                                    // bytes one accumulation step consumes
constexpr size_t kLanes = 8;                                      // 64-bit accumulators
constexpr size_t kStripesPerBlock = (kSecretSize - kStripe) / 8;  // 16
constexpr size_t kBlock = kStripesPerBlock * kStripe;             // 1024 bytes between two scrambles
constexpr size_t kMidMax = 240;                                   // longest input without accumulators
constexpr size_t kScrambleSecret = kSecretSize - kStripe;         // 128
constexpr size_t kLastStripeSecret = kSecretSize - kStripe - 7;   // 121
constexpr size_t kMergeLowSecret = 11;
constexpr size_t kMergeHighSecret = kSecretSize - kStripe - 11;  // 117

constexpr uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;
constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9u;
constexpr uint64_t kPrimeMx2 = 0x9FB21C651E98DF25u;

#define OTK_XXH3_SECRET                                                                                             \
  0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, \
      0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc,   \
      0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24,   \
      0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88,   \
      0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef,   \
      0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7,   \
      0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73,   \
      0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17,   \
      0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe,   \
      0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95,   \
      0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e

alignas(64) constexpr uint8_t kHostSecret[kSecretSize] = {OTK_XXH3_SECRET};
#if defined(__CUDACC__)
// Device code cannot take the address of a host array.
alignas(64) static __constant__ uint8_t kDeviceSecret[kSecretSize] = {OTK_XXH3_SECRET};
#endif

OTK_HD const uint8_t* secret() {
#if defined(__CUDA_ARCH__)
  return kDeviceSecret;
#else
  return kHostSecret;
#endif
}

#if defined(__CUDA_ARCH__)
// A GPU has no unaligned loads: memcpy from an unknown address is one load for each byte. These read the aligned words
// that hold the bytes; the words' other bytes, up to three on each side, must be readable too.
OTK_HD uint32_t read_word(const uint8_t* p) {
  uint32_t v;
  memcpy(&v, __builtin_assume_aligned(p, sizeof v), sizeof v);
  return v;
}

OTK_HD uint32_t read32(const uint8_t* p) {
  const uint32_t skip = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 3;
  if (skip == 0) return read_word(p);
  return (read_word(p - skip) >> (8 * skip)) | (read_word(p - skip + 4) << (32 - 8 * skip));
}

OTK_HD uint64_t read64(const uint8_t* p) {
  const uint32_t skip = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 3;
  const uint64_t words = read_word(p - skip) | (uint64_t{read_word(p - skip + 4)} << 32);
  if (skip == 0) return words;
  return (words >> (8 * skip)) | (uint64_t{read_word(p - skip + 8)} << (64 - 8 * skip));
}
#else
OTK_HD uint32_t read32(const uint8_t* p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

OTK_HD uint64_t read64(const uint8_t* p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
#endif

OTK_HD uint32_t swap32(uint32_t v) { return (v >> 24) | ((v >> 8) & 0xFF00u) | ((v << 8) & 0xFF0000u) | (v << 24); }

OTK_HD uint64_t swap64(uint64_t v) {
  return (uint64_t{swap32(static_cast<uint32_t>(v))} << 32) | swap32(static_cast<uint32_t>(v >> 32));
}

OTK_HD Canonical canonical(const Digest& digest) {
  const uint64_t words[2] = {swap64(digest.high), swap64(digest.low)};
  Canonical out;
  memcpy(out.bytes, words, sizeof words);
  return out;
}

OTK_HD Digest multiply(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return {a * b, __umul64hi(a, b)};
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
#endif
}

OTK_HD uint64_t multiply_fold(uint64_t a, uint64_t b) {
  const Digest product = multiply(a, b);
  return product.low ^ product.high;
}

OTK_HD uint64_t avalanche(uint64_t x) {
  x ^= x >> 37;
  x *= kPrimeMx1;
  return x ^ (x >> 32);
}

OTK_HD uint64_t avalanche_xxh64(uint64_t x) {
  x ^= x >> 33;
  x *= kPrime64_2;
  x ^= x >> 29;
  x *= kPrime64_3;
  return x ^ (x >> 32);
}

OTK_HD Digest hash_0() {
  const uint8_t* s = secret();
  return {avalanche_xxh64(read64(s + 64) ^ read64(s + 72)), avalanche_xxh64(read64(s + 80) ^ read64(s + 88))};
}

OTK_HD Digest hash_1_3(const uint8_t* p, size_t n) {
  const uint8_t* s = secret();
  const uint32_t combined = p[n - 1] | (static_cast<uint32_t>(n) << 8) | (static_cast<uint32_t>(p[0]) << 16) |
                            (static_cast<uint32_t>(p[n >> 1]) << 24);
  const uint32_t swapped = swap32(combined);
  const uint32_t rotated = (swapped << 13) | (swapped >> 19);
  return {avalanche_xxh64(uint64_t{read32(s) ^ read32(s + 4)} ^ combined),
          avalanche_xxh64(uint64_t{read32(s + 8) ^ read32(s + 12)} ^ rotated)};
}

OTK_HD Digest hash_4_8(const uint8_t* p, size_t n) {
  const uint8_t* s = secret();
  const uint64_t combined = read32(p) | (uint64_t{read32(p + n - 4)} << 32);
  Digest d = multiply((read64(s + 16) ^ read64(s + 24)) ^ combined, kPrime64_1 + (n << 2));
  d.high += d.low << 1;
  d.low ^= d.high >> 3;
  d.low ^= d.low >> 35;
  d.low *= kPrimeMx2;
  d.low ^= d.low >> 28;
  return {d.low, avalanche(d.high)};
}

OTK_HD Digest hash_9_16(const uint8_t* p, size_t n) {
  const uint8_t* s = secret();
  const uint64_t first = read64(p);
  const uint64_t last = read64(p + n - 8);
  const uint64_t other = (read64(s + 48) ^ read64(s + 56)) ^ last;
  Digest d = multiply((read64(s + 32) ^ read64(s + 40)) ^ first ^ last, kPrime64_1);
  d.low += uint64_t{n - 1} << 54;
  d.high += other + uint64_t{static_cast<uint32_t>(other)} * (kPrime32_2 - 1);
  d.low ^= swap64(d.high);
  Digest e = multiply(d.low, kPrime64_2);
  e.high += d.high * kPrime64_2;
  return {avalanche(e.low), avalanche(e.high)};
}

// The two running sums of the 17 to 240 byte range.
struct MidSums {
  uint64_t a;
  uint64_t b;

  // The specification adds and subtracts the seed from the secret words here; with seed 0 it vanishes.
  OTK_HD void mix(const uint8_t* p, const uint8_t* q, const uint8_t* s) {
    a += multiply_fold(read64(p) ^ read64(s), read64(p + 8) ^ read64(s + 8));
    b += multiply_fold(read64(q) ^ read64(s + 16), read64(q + 8) ^ read64(s + 24));
    a ^= read64(q) + read64(q + 8);
    b ^= read64(p) + read64(p + 8);
  }
};

OTK_HD Digest hash_17_240(const uint8_t* p, size_t n) {
  const uint8_t* s = secret();
  MidSums sums{n * kPrime64_1, 0};
  if (n <= 128) {
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;) sums.mix(p + 16 * i, p + n - 16 * i - 16, s + 32 * i);
  } else {
    for (size_t i = 0; i < 4; ++i) sums.mix(p + 32 * i, p + 32 * i + 16, s + 32 * i);
    sums = {avalanche(sums.a), avalanche(sums.b)};
    for (size_t i = 4; i < n / 32; ++i) sums.mix(p + 32 * i, p + 32 * i + 16, s + 32 * (i - 4) + 3);
    sums.mix(p + n - 16, p + n - 32, s + 103);
  }
  const uint64_t low = sums.a + sums.b;
  const uint64_t high = sums.a * kPrime64_1 + sums.b * kPrime64_4 + n * kPrime64_2;
  return {avalanche(low), uint64_t{0} - avalanche(high)};
}

// Up to kMidMax bytes.
OTK_HD Digest hash_short(const uint8_t* p, size_t n) {
  if (n > 16) return hash_17_240(p, n);
  if (n > 8) return hash_9_16(p, n);
  if (n >= 4) return hash_4_8(p, n);
  if (n > 0) return hash_1_3(p, n);
  return hash_0();
}

OTK_HD void initialize(uint64_t (&acc)[kLanes]) {
  acc[0] = kPrime32_3;
  acc[1] = kPrime64_1;
  acc[2] = kPrime64_2;
  acc[3] = kPrime64_3;
  acc[4] = kPrime64_4;
  acc[5] = kPrime32_2;
  acc[6] = kPrime64_5;
  acc[7] = kPrime32_1;
}

OTK_HD uint64_t merge(const uint64_t (&acc)[kLanes], const uint8_t* s, uint64_t start) {
  for (size_t i = 0; i < kLanes; i += 2) {
    start += multiply_fold(acc[i] ^ read64(s + 8 * i), acc[i + 1] ^ read64(s + 8 * i + 8));
  }
  return avalanche(start);
}

// The digest of an input of `n` > kMidMax bytes from its final accumulators.
OTK_HD Digest finish(const uint64_t (&acc)[kLanes], size_t n) {
  return {merge(acc, secret() + kMergeLowSecret, n * kPrime64_1),
          merge(acc, secret() + kMergeHighSecret, ~(n * kPrime64_2))};
}

}  // namespace otk::xxh3
