// make_view and copy_content on every kind of layout, with the memory of each tensor allocated exactly.
#include <random>

#include "tests.h"

namespace otk::test {
namespace {

using Sizes = std::vector<int64_t>;

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

dlpack::Tensor describe(const Sizes& shape, const Sizes* strides, dlpack::DataType dtype = {dlpack::kInt, 64, 1}) {
  dlpack::Tensor tensor{};
  tensor.device = {dlpack::kCpu, 0};
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensor.dtype = dtype;
  tensor.shape = shape.data();
  tensor.strides = strides == nullptr ? nullptr : strides->data();
  return tensor;
}

// Gives the tensor memory of exactly its extent, filled with random bytes, and checks its content.
void check_layout(const Sizes& shape, const Sizes* strides, dlpack::DataType dtype, uint64_t byte_offset,
                  std::mt19937_64& random) {
  dlpack::Tensor tensor = describe(shape, strides, dtype);
  const Extent extent = extent_of(tensor);
  const Block memory(static_cast<size_t>(extent.end - extent.begin));
  for (size_t i = 0; i < memory.size(); ++i) memory.data()[i] = static_cast<uint8_t>(random());
  const auto first = reinterpret_cast<uintptr_t>(memory.data()) - static_cast<intptr_t>(extent.begin);
  tensor.data = reinterpret_cast<void*>(first - byte_offset);
  tensor.byte_offset = byte_offset;
  check_content(tensor);
}

void named_layouts() {
  std::mt19937_64 random(1);
  struct {
    Sizes shape;
    Sizes strides;
  } const kLayouts[] = {
      {{}, {}},                                     // 0-d
      {{1}, {1}},                                   //
      {{7}, {1}},                                   //
      {{2, 3, 4}, {12, 4, 1}},                      // row-major
      {{2, 3, 4}, {1, 2, 6}},                       // column-major
      {{4, 3}, {1, 4}},                             // transposed
      {{3, 4}, {10, 1}},                            // a column slice
      {{3, 4}, {8, 2}},                             // every other element
      {{5}, {0}},                                   // expanded
      {{3, 5}, {0, 1}},                             //
      {{3, 5}, {1, 0}},                             //
      {{5}, {-1}},                                  // flipped
      {{3, 4}, {-4, -1}},                           //
      {{3, 4}, {4, -1}},                            //
      {{3, 4}, {1, 1}},                             // overlapping windows
      {{1, 5, 1}, {77, 1, kMax}},                   // strides of size-1 dimensions do not count
      {{1, 5, 1}, {kMin, 2, -9}},                   //
      {{2, 1, 3}, {3, kMin, 1}},                    //
      {{2, 1, 3}, {6, kMax, 2}},                    //
      {{1, 1, 1}, {kMin, kMax, 0}},                 //
      {{2, 3, 4, 5}, {60, 20, 5, 1}},               // all dimensions join into one
      {{2, 3, 4, 5}, {120, 40, 10, 2}},             // all join, with a stride
      {{2, 3, 4, 5}, {200, 20, 5, 1}},              // all but the first join
      {{2, 2, 2, 2, 2, 2}, {1, 2, 4, 8, 16, 32}},   // none join
      {{2, 3, 2, 3}, {-18, -6, 3, 1}},              // mixed signs
      {{kMaxDims, 2, 1, 3}, {-6, 3, 1 << 30, -1}},  //
  };
  for (const auto& layout : kLayouts) {
    for (const uint8_t bits : {8, 16, 32, 64}) {
      check_layout(layout.shape, &layout.strides, {dlpack::kInt, bits, 1}, 0, random);
      check_layout(layout.shape, nullptr, {dlpack::kUInt, bits, 1}, 0, random);
    }
  }
}

void every_number_of_dimensions() {
  std::mt19937_64 random(2);
  for (int32_t ndim = 0; ndim <= kMaxDims; ++ndim) {
    const Sizes ones(ndim, 1);
    const Sizes odd(ndim, kMin);
    check_layout(ones, nullptr, {dlpack::kInt, 64, 1}, 0, random);
    check_layout(ones, &odd, {dlpack::kInt, 64, 1}, 0, random);
    Sizes shape(ndim, 1), strides(ndim, -7);
    for (int32_t i = 0; i < ndim && i < 8; ++i) {  // 2 x 2 x ... at places all over the dimensions
      const int32_t dim = i * ndim / 8;
      shape[dim] = 2;
      strides[dim] = (i % 2 == 0 ? -1 : 1) * (1 << i);
    }
    check_layout(shape, &strides, {dlpack::kInt, 16, 1}, 0, random);
  }
  const Sizes too_many(kMaxDims + 1, 1);
  TensorView view;
  CHECK(make_view(describe(too_many, nullptr), UINT64_MAX, view) == Reason::kMalformed);
}

void random_layouts() {
  std::mt19937_64 random(3);
  const auto below = [&random](uint64_t n) { return static_cast<int64_t>(random() % n); };
  for (int round = 0; round < 20'000; ++round) {
    Sizes shape(below(7)), strides(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      shape[i] = 1 + below(5);
      strides[i] = below(24) - 8;
      if (shape[i] == 1 && below(2) == 0) strides[i] = static_cast<int64_t>(random());
    }
    const auto bits = static_cast<uint8_t>(8 << below(4));
    check_layout(shape, &strides, {dlpack::kInt, bits, 1}, static_cast<uint64_t>(below(3)) * 4096, random);
  }
}

void no_elements() {
  const Sizes shapes[] = {{0}, {2, 0}, {0, 2}, {0, kMax, kMax, kMax}, {1, 0, 1}};
  for (const Sizes& shape : shapes) {
    const Sizes strides(shape.size(), kMin);
    for (const uint8_t code : {0, 1, 2, 4, 6, 99}) {
      for (const uint8_t bits : {0, 4, 8, 128, 255}) {
        TensorView view;
        CHECK(make_view(describe(shape, &strides, {code, bits, 1}), 0, view) == Reason::kNone);
        CHECK(view.nbytes == 0 && view.contiguous);
        copy_content(view, nullptr);  // writes nothing
      }
    }
  }
}

void refused() {
  int64_t element = 5;
  TensorView view;
  const auto reason = [&](const Sizes& shape, const Sizes* strides, uint64_t max_bytes = UINT64_MAX,
                          dlpack::DataType dtype = {dlpack::kInt, 64, 1}, uint64_t byte_offset = 0) {
    dlpack::Tensor tensor = describe(shape, strides, dtype);
    tensor.data = &element;
    tensor.byte_offset = byte_offset;
    const Reason found = make_view(tensor, max_bytes, view);
    CHECK(found == expected_reason(tensor, max_bytes));
    return found;
  };
  const Sizes huge{kMax / 8}, twice{2, kMax / 8}, wild{kMax}, least{kMin}, two{4, 4}, far{kMax / 16, kMax / 16};
  CHECK(reason({2, 4}, nullptr, 64) == Reason::kNone);
  CHECK(reason({2, 4}, nullptr, 63) == Reason::kTooLarge);
  CHECK(reason({kMax}, nullptr) == Reason::kTooLarge);
  CHECK(reason({kMax, kMax, kMax}, nullptr) == Reason::kTooLarge);
  CHECK(reason({kMax, 2}, nullptr, UINT64_MAX, {dlpack::kInt, 8, 1}) == Reason::kTooLarge);
  CHECK(reason({2, -1}, nullptr) == Reason::kMalformed);
  CHECK(reason({kMin, 0}, nullptr) == Reason::kMalformed);
  CHECK(reason({8}, &huge) == Reason::kMalformed);
  CHECK(reason({8}, &wild) == Reason::kMalformed);
  CHECK(reason({8}, &least) == Reason::kMalformed);
  CHECK(reason({8, 8}, &far) == Reason::kMalformed);
  CHECK(reason({1}, nullptr, 8, {dlpack::kInt, 64, 1}, UINT64_MAX) == Reason::kMalformed);
  for (const dlpack::DataType dtype : {dlpack::DataType{0, 64, 2},
                                       {0, 64, 0},
                                       {0, 7, 1},
                                       {0, 128, 1},
                                       {2, 32, 1},
                                       {4, 16, 1},
                                       {6, 16, 1},
                                       {3, 64, 1},
                                       {255, 8, 1},
                                       {0, 0, 1}}) {
    CHECK(reason({1}, nullptr, 64, dtype) == Reason::kDtype);
  }
  dlpack::Tensor tensor = describe(two, nullptr);
  CHECK(make_view(tensor, UINT64_MAX, view) == Reason::kNoStorage);
  tensor.shape = nullptr;
  CHECK(make_view(tensor, UINT64_MAX, view) == Reason::kMalformed);
  tensor.ndim = -1;
  CHECK(make_view(tensor, UINT64_MAX, view) == Reason::kMalformed);
}

void names() {
  for (int code = 0; code < 256; ++code) {
    for (int bits = 0; bits < 256; ++bits) {
      CHECK(dtype_name({static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1})[0] != '\0');
    }
  }
  for (int type = -3; type < 64; ++type) CHECK(device_name(type)[0] != '\0');
  CHECK(strcmp(reason_name(Reason::kNone), "none") == 0);
  CHECK(strcmp(reason_name(Reason::kMalformed), "malformed") == 0);
}

}  // namespace

void test_tensor_view() {
  named_layouts();
  every_number_of_dimensions();
  random_layouts();
  no_elements();
  refused();
  names();
}

}  // namespace otk::test
