// The native unit tests. Each function returns, or ends the program at the first check that fails.
#pragma once

#include "support.h"

namespace otk::test {

// `vectors`: the path of tests/vectors/xxh3_128.json.
void test_xxh3(const char* vectors);
void test_tensor_view();
void test_exchange_table();

}  // namespace otk::test
