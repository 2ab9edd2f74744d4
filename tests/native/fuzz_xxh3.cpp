// The content hash: every instruction set gives the digest of the scalar code, and none reads outside its input.
#include "hash/xxh3_dispatch.h"
#include "support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace otk;
  const test::Block input(data, size);
  const xxh3::SimdPaths& paths = xxh3::simd_paths();
  const xxh3::Digest expected = xxh3::hash(input.data(), size, paths.path[paths.count - 1].run);
  for (size_t i = 0; i < paths.count; ++i) {
    const xxh3::Digest found = xxh3::hash(input.data(), size, paths.path[i].run);
    CHECK(found.low == expected.low && found.high == expected.high);
    test::Block copy(size);
    const xxh3::Digest copied = xxh3::copy_and_hash(copy.data(), input.data(), size, paths.path[i].run);
    CHECK(copied.low == expected.low && copied.high == expected.high);
    CHECK(size == 0 || memcmp(copy.data(), data, size) == 0);
  }
  return 0;
}
