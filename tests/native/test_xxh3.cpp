// The content hash on every instruction set of this CPU, each input in a block of its exact size.
#include <algorithm>
#include <string>

#include "hash/xxh3_dispatch.h"
#include "tests.h"

namespace otk::test {
namespace {

// The byte sequence of the vector file; see tests/vectors/make.py.
std::vector<uint8_t> sequence(size_t size) {
  std::vector<uint8_t> bytes(size);
  uint64_t word = 2654435761u;
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(word >> 56);
    word *= 11400714785074694797u;
  }
  return bytes;
}

std::string hex(const xxh3::Digest& digest) {
  char text[33];
  snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(digest.high),
           static_cast<unsigned long long>(digest.low));
  return text;
}

void vectors_on_every_path(const char* path) {
  FILE* file = fopen(path, "r");
  CHECK(file != nullptr);
  const std::vector<uint8_t> content = sequence((1 << 20) + 1);
  int found = 0;
  char line[256];
  while (fgets(line, sizeof line, file) != nullptr) {
    size_t length;
    char digest[33];
    if (sscanf(line, " \"%zu\" : \"%32[0-9a-f]\"", &length, digest) != 2) continue;
    CHECK(length <= content.size());
    const Block input(content.data(), length);
    const xxh3::SimdPaths& paths = xxh3::simd_paths();
    for (size_t i = 0; i < paths.count; ++i) {
      CHECK(hex(xxh3::hash(input.data(), length, paths.path[i].run)) == digest);
      Block copy(length);
      CHECK(hex(xxh3::copy_and_hash(copy.data(), input.data(), length, paths.path[i].run)) == digest);
      CHECK(std::equal(input.data(), input.data() + length, copy.data()));
    }
    ++found;
  }
  fclose(file);
  CHECK(found > 50);
}

void paths_agree_at_every_length_and_offset() {
  const std::vector<uint8_t> content = sequence(4096 + 64);
  const xxh3::SimdPaths& paths = xxh3::simd_paths();
  const xxh3::LongLoopFn scalar = paths.path[paths.count - 1].run;
  CHECK(strcmp(paths.path[paths.count - 1].name, "scalar") == 0);
  for (size_t length = 0; length <= 4096; ++length) {
    // The input ends with its block and begins anywhere in a vector register's width.
    const size_t offset = length % 64;
    const Block input(content.data(), offset + length);
    const xxh3::Digest expected = xxh3::hash(input.data() + offset, length, scalar);
    for (size_t i = 0; i < paths.count; ++i) {
      const xxh3::Digest found = xxh3::hash(input.data() + offset, length, paths.path[i].run);
      CHECK(found.low == expected.low && found.high == expected.high);
      Block copy(length);
      const xxh3::Digest copied = xxh3::copy_and_hash(copy.data(), input.data() + offset, length, paths.path[i].run);
      CHECK(copied.low == expected.low && copied.high == expected.high);
      CHECK(std::equal(copy.data(), copy.data() + length, input.data() + offset));
    }
  }
}

}  // namespace

void test_xxh3(const char* vectors) {
  vectors_on_every_path(vectors);
  paths_agree_at_every_length_and_offset();
}

}  // namespace otk::test
