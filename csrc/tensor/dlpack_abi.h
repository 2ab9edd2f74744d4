// The part of DLPack's C ABI (major version 1) that this extension reads: how a producer describes a tensor, and the
// table through which a Python tensor type offers it. Declared here, so that building needs no foreign header.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace otk::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr char kCapsuleName[] = "dlpack_exchange_api";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };

enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kBool = 6 };

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  const int64_t* shape;    // borrowed from the Python tensor
  const int64_t* strides;  // in elements; may be null for a row-major tensor (before DLPack 1.2)
  uint64_t byte_offset;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ExchangeHeader {
  Version version;
  const ExchangeHeader* prev_api;  // the same producer's table of an older major version, or null
};

struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

static_assert(sizeof(void*) == 8, "64-bit only");
static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, dtype) == 20 && offsetof(Tensor, byte_offset) == 40);
static_assert(sizeof(ExchangeHeader) == 16 && offsetof(ExchangeApi, dltensor_from_py_object_no_sync) == 40);

}  // namespace otk::dlpack
