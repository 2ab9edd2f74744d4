// Chains of exchange tables: every version, missing functions, ends and loops. A table of another major version is
// only a header, exactly allocated.
#include "fuzz_input.h"

namespace {

constexpr uint32_t kMostTables = 20;

int describe(void*, otk::dlpack::Tensor*) { return -1; }

// The rule of usable_table: the first of 16 tables that has version 1 and the function.
const otk::dlpack::ExchangeHeader* expected_table(const otk::dlpack::ExchangeHeader* header, const bool* has_slot,
                                                  const std::vector<const otk::dlpack::ExchangeHeader*>& tables) {
  for (int step = 0; step < 16 && header != nullptr; ++step, header = header->prev_api) {
    for (size_t i = 0; i < tables.size(); ++i) {
      if (tables[i] == header && header->version.major == 1 && has_slot[i]) return header;
    }
  }
  return nullptr;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace otk;
  test::Input input(data, size);
  const uint32_t count = input.below(kMostTables + 1);
  std::vector<test::Block> memory;
  std::vector<const dlpack::ExchangeHeader*> tables;
  bool has_slot[kMostTables];
  for (uint32_t i = 0; i < count; ++i) {
    dlpack::ExchangeApi api{};
    api.header.version = {input.one_in(8) ? input.raw<uint32_t>() : input.below(4), input.raw<uint8_t>()};
    has_slot[i] = input.below(2) == 0;
    api.dltensor_from_py_object_no_sync = has_slot[i] ? describe : nullptr;
    const bool whole = api.header.version.major == dlpack::kMajorVersion;
    memory.emplace_back(reinterpret_cast<const uint8_t*>(&api), whole ? sizeof api : sizeof api.header);
    tables.push_back(reinterpret_cast<const dlpack::ExchangeHeader*>(memory.back().data()));
  }
  for (uint32_t i = 0; i < count; ++i) {
    // The next table, any table (its own loop among them) or the end.
    const uint32_t choice = input.below(4);
    const uint32_t next = choice < 2 ? i + 1 : input.below(count);
    auto* header = reinterpret_cast<dlpack::ExchangeHeader*>(memory[i].data());
    header->prev_api = choice == 3 || next >= count ? nullptr : tables[next];
  }
  const dlpack::ExchangeHeader* first = count == 0 ? nullptr : tables[0];
  const auto* found = reinterpret_cast<const dlpack::ExchangeHeader*>(usable_table(first));
  CHECK(found == expected_table(first, has_slot, tables));
  return 0;
}
