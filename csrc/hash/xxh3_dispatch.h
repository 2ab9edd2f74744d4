// The content hash of this CPU: XXH3-128 with the widest vector unit found at run time.
#pragma once

#include "xxh3.h"

namespace otk::xxh3 {

// Runs the accumulation loop over an input of `n` > kMidMax bytes and, unless it is null, writes them to `copy` in the
// same pass.
using LongLoopFn = void (*)(uint64_t (&acc)[kLanes], const uint8_t* p, size_t n, uint8_t* copy);

struct SimdPath {
  const char* name;
  LongLoopFn run;
};

// The paths this CPU can run, the preferred one first; the last one is always "scalar".
struct SimdPaths {
  SimdPath path[4];
  size_t count;
};
const SimdPaths& simd_paths();

Digest hash(const void* data, size_t n, LongLoopFn loop = simd_paths().path[0].run);

// Copies the input, which must not overlap `copy`, and returns the digest of the copy.
Digest copy_and_hash(uint8_t* copy, const void* data, size_t n, LongLoopFn loop = simd_paths().path[0].run);

}  // namespace otk::xxh3
