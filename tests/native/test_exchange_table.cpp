// usable_table on chains of exchange tables. A table of another major version is only a header, exactly allocated:
// what follows the header of such a table is unknown and must not be read.
#include "tests.h"

namespace otk::test {
namespace {

int describe(void*, dlpack::Tensor*) { return -1; }

dlpack::ExchangeApi table(uint32_t major, bool has_slot, const dlpack::ExchangeHeader* prev) {
  dlpack::ExchangeApi api{};
  api.header = {{major, 0}, prev};
  api.dltensor_from_py_object_no_sync = has_slot ? describe : nullptr;
  return api;
}

}  // namespace

void test_exchange_table() {
  const auto header = [](uint32_t major, const dlpack::ExchangeHeader* prev) {
    return std::make_unique<dlpack::ExchangeHeader>(dlpack::ExchangeHeader{{major, 0}, prev});
  };
  const dlpack::ExchangeApi good = table(1, true, nullptr);
  const dlpack::ExchangeApi empty = table(1, false, nullptr);
  const dlpack::ExchangeApi empty_before_good = table(1, false, &good.header);
  const auto newer = header(2, &good.header);
  const auto alone = header(2, nullptr);
  const auto older = header(0, nullptr);
  const auto to_empty = header(2, &empty.header);
  const auto chain = header(3, newer.get());

  CHECK(usable_table(nullptr) == nullptr);
  CHECK(usable_table(&good.header) == &good);
  CHECK(usable_table(&empty.header) == nullptr);
  CHECK(usable_table(&empty_before_good.header) == &good);
  CHECK(usable_table(newer.get()) == &good);
  CHECK(usable_table(chain.get()) == &good);
  CHECK(usable_table(alone.get()) == nullptr);
  CHECK(usable_table(older.get()) == nullptr);
  CHECK(usable_table(to_empty.get()) == nullptr);

  const auto loop = header(2, nullptr);
  const auto second = header(3, loop.get());
  loop->prev_api = second.get();
  CHECK(usable_table(loop.get()) == nullptr);
  loop->prev_api = loop.get();
  CHECK(usable_table(loop.get()) == nullptr);
}

}  // namespace otk::test
