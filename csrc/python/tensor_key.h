// TensorKey: the Python object that stands for one tensor in a cache key.
#pragma once

#include "../hash/xxh3.h"
#include "../tensor/tensor_view.h"
#include "python.h"

namespace otk::py {

// Variable-sized: the shape (8 bytes each) follows the fixed part, and the content follows the shape.
struct KeyObject {
  PyObject_VAR_HEAD xxh3::Digest digest;
  Py_hash_t hash;
  uint64_t nbytes;
  dlpack::Device device;
  dlpack::DataType dtype;
  int32_t ndim;  // at most kMaxDims

  int64_t* shape() { return reinterpret_cast<int64_t*>(this + 1); }
  uint8_t* content() { return reinterpret_cast<uint8_t*>(shape() + ndim); }
  bool sealed() const { return hash != kUnsealed; }

  static constexpr Py_hash_t kUnsealed = -1;  // no object's hash in CPython
};
static_assert(sizeof(KeyObject) % alignof(int64_t) == 0 && sizeof(KeyObject) <= 96);

// The type object; made by make_tensor_key_type(), which module initialization calls once.
extern PyTypeObject* tensor_key_type;
bool make_tensor_key_type(PyObject* module);

// A key of the view's shape, dtype and device without its content: the caller writes that and seals the key before
// Python sees it. New reference, or null with an error. Runs no Python code.
KeyObject* new_key(const TensorView& view);

// Whether the key's shape, dtype and size are those of the view.
bool describes(KeyObject* key, const TensorView& view);

// Whether the key's device is that of the view.
bool on_device_of(const KeyObject* key, const TensorView& view);

// Sets the digest of the content, and the hash. Touches no Python state: it may run without the GIL.
void seal(KeyObject* key, const xxh3::Digest& digest);

// Makes a key of what its __reduce__() returned: restore_key(dtype code, dtype bits, device type, device index, shape,
// content). Raises ValueError for anything else.
PyObject* restore_key(PyObject* module, PyObject* args);

}  // namespace otk::py
