// The program that runs the native unit tests: test_native path/to/xxh3_128.json
#include "hash/xxh3_dispatch.h"
#include "tests.h"

int main(int argc, char** argv) {
  CHECK(argc == 2);
  otk::test::test_xxh3(argv[1]);
  otk::test::test_tensor_view();
  otk::test::test_exchange_table();
  printf("native unit tests passed (SIMD path %s)\n", otk::xxh3::simd_paths().path[0].name);
}
