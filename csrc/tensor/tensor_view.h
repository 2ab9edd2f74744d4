// A checked description of a strided tensor, and its content as row-major bytes. No Python here.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "dlpack_abi.h"

namespace otk {

// Why a value has no key. The order is that of reason_name()'s table.
enum class Reason : uint8_t {
  kNone,
  kNotATensor,    // no tensor, and nothing upstream can key
  kSubclass,      // a tensor subclass
  kDtype,         // elements that are neither bool nor integers
  kTooLarge,      // more than max_bytes
  kUnexportable,  // the producer cannot describe it: meta, sparse, quantized, nested, ...
  kNoStorage,     // elements without storage: fake or wrapped by a transform
  kGraphCapture,  // reading it would synchronize a stream that is being captured
  kChanged,       // its shape, dtype or device changed while the key was being made
  kMalformed,     // a description that contradicts itself
};

// Short, stable names for counters and error attributes.
const char* reason_name(Reason reason);

constexpr int32_t kMaxDims = 64;

// Valid only while the tensor is alive and unchanged: `data` points into its storage.
struct TensorView {
  const uint8_t* data;
  dlpack::Device device;
  dlpack::DataType dtype;
  uint64_t nbytes;     // content size: elements times item size
  uint32_t item_size;  // bytes
  int32_t ndim;
  bool contiguous;  // the storage holds the content in row-major order
  int64_t shape[kMaxDims];
  int64_t strides[kMaxDims];  // in elements, 0 for a dimension of size 1; meaningless where contiguous

  bool on_host() const { return device.type == dlpack::kCpu; }
};

// The loop over a strided tensor with as few dimensions as it can be written with; none for one element.
struct Strided {
  int32_t ndim = 0;
  int64_t shape[kMaxDims];
  int64_t strides[kMaxDims];  // in elements
};

// Drops dimensions of size 1 and joins neighbours that one stride can walk. Not for contiguous views.
Strided collapse(const TensorView& view);

// The first table in the chain of `header` with a major version this code knows and the slot it calls; null if none.
const dlpack::ExchangeApi* usable_table(const dlpack::ExchangeHeader* header);

// Checks `tensor` and fills `view`; on any reason but kNone `view` must not be read.
Reason make_view(const dlpack::Tensor& tensor, uint64_t max_bytes, TensorView& view);

// Writes view.nbytes bytes of content to `out`. Host tensors only.
void copy_content(const TensorView& view, uint8_t* out);

// The dtype as torch spells it, without "torch."; "unknown" for a type torch has no name for.
const char* dtype_name(dlpack::DataType dtype);

// The device type as torch spells it.
const char* device_name(int32_t device_type);

}  // namespace otk
