// What the native tests and the fuzz targets share: a check that ends the program, blocks of memory that end exactly
// where their content ends, and what csrc/tensor/tensor_view.h promises, written down a second time as plainly as
// possible.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <limits>
#include <memory>
#include <vector>

#include "tensor/tensor_view.h"

// Not assert(): it must hold whatever NDEBUG is.
#define CHECK(condition) ((condition) ? void() : otk::test::fail(#condition, __FILE__, __LINE__))

namespace otk::test {

[[noreturn]] inline void fail(const char* condition, const char* file, int line) {
  fprintf(stderr, "%s:%d: not true: %s\n", file, line, condition);
  abort();
}

// A heap block of its own for `size` bytes, so that AddressSanitizer stops the first byte read before or after it.
class Block {
 public:
  explicit Block(size_t size) : bytes_(new uint8_t[size]), size_(size) {}
  Block(const uint8_t* from, size_t size) : Block(size) {
    if (size > 0) memcpy(data(), from, size);
  }
  uint8_t* data() const { return bytes_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
  size_t size_;
};

using Wide = __int128;  // no offset of a tensor overflows it: 64 dimensions of at most 2^129 saturate in times()

constexpr Wide kWideLimit = Wide{1} << 120;

inline Wide clamp(Wide x) { return x > kWideLimit ? kWideLimit : x < -kWideLimit ? -kWideLimit : x; }

inline Wide times(Wide a, Wide b) {
  Wide product;
  if (!__builtin_mul_overflow(a, b, &product)) return clamp(product);
  return (a < 0) == (b < 0) ? kWideLimit : -kWideLimit;
}

// A stride as DLPack defines it: row-major where there are none.
inline Wide stride_of(const dlpack::Tensor& tensor, int32_t dim) {
  if (tensor.strides != nullptr) return tensor.strides[dim];
  Wide stride = 1;
  for (int32_t i = tensor.ndim - 1; i > dim; --i) stride = times(stride, tensor.shape[i]);
  return stride;
}

inline Wide count_of(const dlpack::Tensor& tensor) {
  Wide count = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) count = times(count, tensor.shape[i]);
  return count;
}

// Where the bytes of a tensor with elements lie, relative to its first element.
struct Extent {
  Wide begin = 0;
  Wide end = 0;
};

inline Extent extent_of(const dlpack::Tensor& tensor) {
  const Wide item = tensor.dtype.bits / 8;
  Extent extent{0, item};
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    const Wide reach = times(times(tensor.shape[i] - Wide{1}, stride_of(tensor, i)), item);
    (reach < 0 ? extent.begin : extent.end) = clamp((reach < 0 ? extent.begin : extent.end) + reach);
  }
  return extent;
}

// The content, element by element.
inline std::vector<uint8_t> content_of(const dlpack::Tensor& tensor, const uint8_t* first) {
  const size_t item = tensor.dtype.bits / 8;
  const auto count = static_cast<size_t>(count_of(tensor));
  std::vector<uint8_t> content(count * item);
  for (size_t element = 0; element < count; ++element) {
    size_t rest = element;
    Wide offset = 0;
    for (int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
      const auto size = static_cast<size_t>(tensor.shape[dim]);
      offset += Wide(rest % size) * stride_of(tensor, dim);
      rest /= size;
    }
    memcpy(content.data() + element * item, first + static_cast<ptrdiff_t>(offset) * static_cast<ptrdiff_t>(item),
           item);
  }
  return content;
}

// What make_view must answer.
inline Reason expected_reason(const dlpack::Tensor& tensor, uint64_t max_bytes) {
  if (tensor.ndim < 0 || tensor.ndim > kMaxDims) return Reason::kMalformed;
  if (tensor.ndim > 0 && tensor.shape == nullptr) return Reason::kMalformed;
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] < 0) return Reason::kMalformed;
  }
  if (tensor.dtype.lanes != 1) return Reason::kDtype;
  if (count_of(tensor) == 0) return Reason::kNone;
  const auto [code, bits, lanes] = tensor.dtype;
  const bool number = code <= dlpack::kUInt && (bits == 8 || bits == 16 || bits == 32 || bits == 64);
  if (!number && !(code == dlpack::kBool && bits == 8)) return Reason::kDtype;
  const Wide nbytes = times(count_of(tensor), bits / 8);
  if (nbytes > max_bytes || nbytes > std::numeric_limits<int64_t>::max()) return Reason::kTooLarge;
  if (tensor.data == nullptr) return Reason::kNoStorage;
  if (tensor.byte_offset > UINTPTR_MAX - reinterpret_cast<uintptr_t>(tensor.data)) return Reason::kMalformed;
  bool row_major = true;
  Wide expected = 1, reach = 0;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 1) continue;  // its stride is never walked
    const Wide stride = stride_of(tensor, i);
    row_major &= stride == expected;
    expected = times(expected, tensor.shape[i]);
    reach = clamp(reach + times(times(stride < 0 ? -stride : stride, tensor.shape[i]), bits / 8));
  }
  return row_major || reach <= std::numeric_limits<int64_t>::max() ? Reason::kNone : Reason::kMalformed;
}

// Makes the view of a tensor whose memory exists, copies it into a block of its exact size and compares.
inline void check_content(const dlpack::Tensor& tensor) {
  TensorView view;
  CHECK(make_view(tensor, UINT64_MAX, view) == Reason::kNone);
  const std::vector<uint8_t> expected =
      content_of(tensor, static_cast<const uint8_t*>(tensor.data) + tensor.byte_offset);
  CHECK(view.nbytes == expected.size());
  const Block copy(view.nbytes);
  copy_content(view, copy.data());
  CHECK(memcmp(copy.data(), expected.data(), view.nbytes) == 0);
}

}  // namespace otk::test
