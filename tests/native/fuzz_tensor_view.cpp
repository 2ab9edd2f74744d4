// Descriptions that a producer might hand over, from the ordinary to the impossible. The answer of make_view must be
// the one that its rules, written down a second time, give; and where a tensor is accepted its memory is allocated
// exactly, and its content must be what a loop over the elements reads.
#include "fuzz_input.h"

namespace otk::test {
namespace {

constexpr int32_t kMostDims = kMaxDims + 6;
constexpr Wide kMostElements = 1 << 12;
constexpr Wide kMostBytes = 1 << 16;  // of an extent: a tensor that reaches further has no memory here

struct Case {
  dlpack::Tensor tensor{};
  int64_t shape[kMostDims];
  int64_t strides[kMostDims];
  uint64_t max_bytes;
};

void decode(Input input, Case& out) {
  dlpack::Tensor& tensor = out.tensor;
  const uint64_t limits[] = {UINT64_MAX, 1 << 20, 4096, 8, 0, uint64_t{1} << 63};
  out.max_bytes = limits[input.below(6)];
  tensor.device = {input.one_in(8) ? input.raw<int32_t>() : int32_t{dlpack::kCpu}, input.raw<int8_t>()};
  const uint8_t bits[] = {8, 16, 32, 64};
  tensor.dtype = {static_cast<uint8_t>(input.below(2)), bits[input.below(4)], 1};
  if (input.one_in(8)) tensor.dtype = input.raw<dlpack::DataType>();
  if (input.one_in(8)) tensor.dtype = {dlpack::kBool, 8, 1};
  tensor.byte_offset = input.below(2) == 0 ? 0 : static_cast<uint64_t>(input.number());
  tensor.data = input.one_in(16) ? nullptr : reinterpret_cast<void*>(uintptr_t{1} << 32);
  tensor.shape = input.one_in(32) ? nullptr : out.shape;
  const bool has_strides = !input.one_in(4);
  tensor.strides = has_strides ? out.strides : nullptr;
  tensor.ndim = static_cast<int32_t>(input.below(5));
  const int32_t edges[] = {-1, kMaxDims - 1, kMaxDims, kMaxDims + 1};
  if (input.one_in(8)) tensor.ndim = edges[input.below(4)];
  if (input.one_in(8)) tensor.ndim = static_cast<int32_t>(input.below(kMostDims + 6)) - 5;
  // Mostly small sizes, so that most tensors of many dimensions can exist.
  const bool plausible = !input.one_in(4);
  for (int32_t i = 0; i < kMostDims; ++i) {
    out.shape[i] = 1;
    out.strides[i] = 1;
  }
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    out.shape[i] = plausible ? 1 + input.below(tensor.ndim > 6 ? 2 : 6) : input.number();
    out.strides[i] = input.number();
  }
}

bool can_exist(const dlpack::Tensor& tensor) {
  const Extent extent = extent_of(tensor);
  return count_of(tensor) <= kMostElements && extent.end - extent.begin <= kMostBytes;
}

void check_existing(dlpack::Tensor tensor) {
  const Extent extent = extent_of(tensor);
  const Block memory(static_cast<size_t>(extent.end - extent.begin));
  for (size_t i = 0; i < memory.size(); ++i) memory.data()[i] = static_cast<uint8_t>((i * 0x9E3779B97F4A7C15u) >> 56);
  // byte_offset was accepted with another address: here it may be anything, as long as the sum is the first element.
  tensor.byte_offset %= 1 << 20;
  tensor.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory.data()) -
                                        static_cast<intptr_t>(extent.begin) - tensor.byte_offset);
  check_content(tensor);
}

}  // namespace
}  // namespace otk::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace otk;
  test::Case input;
  test::decode(test::Input(data, size), input);
  TensorView view;
  const Reason reason = make_view(input.tensor, input.max_bytes, view);
  CHECK(reason == test::expected_reason(input.tensor, input.max_bytes));
  CHECK(reason_name(reason)[0] != '\0' && dtype_name(input.tensor.dtype)[0] != '\0');
  CHECK(device_name(input.tensor.device.type)[0] != '\0');
  if (reason != Reason::kNone) return 0;
  CHECK(view.nbytes <= input.max_bytes);
  if (view.nbytes == 0) {
    copy_content(view, nullptr);  // writes nothing
  } else if (test::can_exist(input.tensor)) {
    test::check_existing(input.tensor);
  }
  return 0;
}
