#include "tensor_view.h"

#include <string.h>

namespace otk {
namespace {

bool is_keyed_dtype(dlpack::DataType dtype) {
  if (dtype.code == dlpack::kBool) return dtype.bits == 8;
  if (dtype.code != dlpack::kInt && dtype.code != dlpack::kUInt) return false;
  return dtype.bits == 8 || dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64;
}

// Dimensions of size 1 carry arbitrary strides and must not count.
bool is_row_major(const dlpack::Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 1) continue;
    if (tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

template <class Item>
uint8_t* copy_row(const uint8_t* from, int64_t count, int64_t stride, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i, out += sizeof(Item)) {
    memcpy(out, from + i * stride * static_cast<int64_t>(sizeof(Item)), sizeof(Item));
  }
  return out;
}

uint8_t* copy_row(const uint8_t* from, int64_t count, int64_t stride, uint32_t item_size, uint8_t* out) {
  if (stride == 1) {
    const size_t size = static_cast<size_t>(count) * item_size;
    memcpy(out, from, size);
    return out + size;
  }
  switch (item_size) {
    case 1:
      return copy_row<uint8_t>(from, count, stride, out);
    case 2:
      return copy_row<uint16_t>(from, count, stride, out);
    case 4:
      return copy_row<uint32_t>(from, count, stride, out);
    default:
      return copy_row<uint64_t>(from, count, stride, out);
  }
}

void copy_strided(const TensorView& view, uint8_t* out) {
  const Strided loop = collapse(view);
  const int32_t inner = loop.ndim - 1;
  int64_t index[kMaxDims] = {};
  const uint8_t* row = view.data;
  while (true) {
    out = copy_row(row, loop.shape[inner], loop.strides[inner], view.item_size, out);
    int32_t d = inner - 1;
    for (; d >= 0; --d) {
      const int64_t step = loop.strides[d] * view.item_size;
      row += step;
      if (++index[d] < loop.shape[d]) break;
      row -= step * loop.shape[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace

const dlpack::ExchangeApi* usable_table(const dlpack::ExchangeHeader* header) {
  constexpr int kMaxTables = 16;  // a chain is one table for each major version; a longer one is a loop
  for (int i = 0; header != nullptr && i < kMaxTables; ++i, header = header->prev_api) {
    if (header->version.major != dlpack::kMajorVersion) continue;
    const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
    if (api->dltensor_from_py_object_no_sync != nullptr) return api;
  }
  return nullptr;
}

const char* reason_name(Reason reason) {
  static const char* const kNames[] = {"none",         "type",    "subclass",      "dtype",   "size",
                                       "unexportable", "storage", "graph_capture", "changed", "malformed"};
  return kNames[static_cast<uint8_t>(reason)];
}

Reason make_view(const dlpack::Tensor& tensor, uint64_t max_bytes, TensorView& view) {
  if (tensor.ndim < 0 || tensor.ndim > kMaxDims || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    return Reason::kMalformed;
  }
  bool empty = false;
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] < 0) return Reason::kMalformed;
    if (tensor.shape[i] == 0) empty = true;
  }
  // Without elements nothing is read, so every dtype has the same, empty, content.
  if (tensor.dtype.lanes != 1 || (!empty && !is_keyed_dtype(tensor.dtype))) return Reason::kDtype;

  view.device = tensor.device;
  view.dtype = tensor.dtype;
  view.item_size = tensor.dtype.bits / 8;
  view.ndim = tensor.ndim;
  view.nbytes = 0;
  view.data = nullptr;
  view.contiguous = true;
  for (int32_t i = 0; i < tensor.ndim; ++i) view.shape[i] = tensor.shape[i];
  if (empty) return Reason::kNone;

  uint64_t nbytes = view.item_size;
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    if (__builtin_mul_overflow(nbytes, static_cast<uint64_t>(tensor.shape[i]), &nbytes)) return Reason::kTooLarge;
  }
  if (nbytes > max_bytes || nbytes > INT64_MAX) return Reason::kTooLarge;
  if (tensor.data == nullptr) return Reason::kNoStorage;
  uintptr_t address;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(tensor.data), tensor.byte_offset, &address)) {
    return Reason::kMalformed;
  }

  view.nbytes = nbytes;
  view.data = reinterpret_cast<const uint8_t*>(address);
  view.contiguous = is_row_major(tensor);
  if (view.contiguous) return Reason::kNone;
  int64_t reach = 0;  // bytes; every offset that the copy computes stays below it
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    // Never walked, and arbitrary in a dimension of size 1.
    const int64_t stride = tensor.shape[i] == 1 ? 0 : tensor.strides[i];
    int64_t span;
    if (stride == INT64_MIN || __builtin_mul_overflow(stride < 0 ? -stride : stride, tensor.shape[i], &span) ||
        __builtin_mul_overflow(span, int64_t{view.item_size}, &span) || __builtin_add_overflow(reach, span, &reach)) {
      return Reason::kMalformed;
    }
    view.strides[i] = stride;
  }
  return Reason::kNone;
}

Strided collapse(const TensorView& view) {
  Strided out;
  for (int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 1) continue;
    const int32_t last = out.ndim - 1;
    if (last >= 0 && out.strides[last] == view.strides[i] * view.shape[i]) {
      out.shape[last] *= view.shape[i];
      out.strides[last] = view.strides[i];
    } else {
      out.shape[out.ndim] = view.shape[i];
      out.strides[out.ndim++] = view.strides[i];
    }
  }
  return out;
}

void copy_content(const TensorView& view, uint8_t* out) {
  if (view.nbytes == 0) return;
  if (view.contiguous) {
    memcpy(out, view.data, view.nbytes);
  } else {
    copy_strided(view, out);
  }
}

const char* dtype_name(dlpack::DataType dtype) {
  static const struct {
    uint8_t code;
    uint8_t bits;
    const char* name;
  } kNames[] = {
      {0, 8, "int8"},
      {0, 16, "int16"},
      {0, 32, "int32"},
      {0, 64, "int64"},
      {1, 8, "uint8"},
      {1, 16, "uint16"},
      {1, 32, "uint32"},
      {1, 64, "uint64"},
      {6, 8, "bool"},
      {2, 16, "float16"},
      {2, 32, "float32"},
      {2, 64, "float64"},
      {4, 16, "bfloat16"},
      {5, 32, "complex32"},
      {5, 64, "complex64"},
      {5, 128, "complex128"},
      {10, 8, "float8_e4m3fn"},
      {11, 8, "float8_e4m3fnuz"},
      {12, 8, "float8_e5m2"},
      {13, 8, "float8_e5m2fnuz"},
      {14, 8, "float8_e8m0fnu"},
  };
  for (const auto& entry : kNames) {
    if (entry.code == dtype.code && entry.bits == dtype.bits) return entry.name;
  }
  return "unknown";
}

const char* device_name(int32_t device_type) {
  switch (device_type) {
    case dlpack::kCpu:
      return "cpu";
    case dlpack::kCuda:
      return "cuda";
    case 8:
      return "mps";
    case 10:
      return "rocm";
    case 12:
      return "privateuseone";
    case 14:
      return "xpu";
    case 17:
      return "maia";
    default:
      return "device";
  }
}

}  // namespace otk
