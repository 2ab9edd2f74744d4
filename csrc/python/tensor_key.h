// TensorKey: the Python object that stands for one tensor in a cache key.
#pragma once

#include <new>

#include "../tensor_view.h"
#include "../xxh3.h"
#include "python.h"

namespace otk::py {

constexpr uintptr_t kContentAlignment = 32;  // bytes

// The time from a KeyBuilder's making to its close(), shared with the keys that it made. Guarded by the GIL.
class Era {
 public:
  static Era* begin() { return new (std::nothrow) Era; }
  Era* share() {
    ++owners_;
    return this;
  }
  void release() {
    if (--owners_ == 0) delete this;
  }
  void end() { over_ = true; }
  bool is_over() const { return over_; }

 private:
  Era() = default;
  size_t owners_ = 1;
  bool over_ = false;
};

// Variable-sized: the shape (8 bytes each) follows the fixed part, and then, aligned for the vector units, the content.
struct KeyObject {
  PyObject_VAR_HEAD xxh3::Digest digest;
  Py_hash_t hash;
  uint64_t nbytes;
  // Where the content was read; a plain number for the alias guard. No lifetime hangs on it, and it is no part of the
  // key: neither == nor hash() look at it.
  uintptr_t source;
  // When it is over, the key equals nothing but itself: calls that are still under way have the key, and nobody guards
  // what they store. Owned; null for a key that no builder made.
  Era* era;
  // Keys that have been found equal share a number, so that their bytes are compared once: content never changes, and
  // upstream looks a key up three times. Guarded by the GIL; no part of the key either.
  uint64_t equals;
  dlpack::Device device;
  dlpack::DataType dtype;
  int16_t ndim;  // at most kMaxDims
  bool sealed;   // content, digest and hash are set

  int64_t* shape() { return reinterpret_cast<int64_t*>(this + 1); }
  uint8_t* content() {
    const auto end = reinterpret_cast<uintptr_t>(shape() + ndim);
    return reinterpret_cast<uint8_t*>((end + kContentAlignment - 1) / kContentAlignment * kContentAlignment);
  }
};
static_assert(sizeof(KeyObject) % alignof(int64_t) == 0 && sizeof(KeyObject) <= 96);

// The type object; made by make_tensor_key_type(), which module initialization calls once.
extern PyTypeObject* tensor_key_type;
bool make_tensor_key_type();

// A key of the view's shape, dtype and device whose content is not set yet. Until it is sealed, comparing it, hashing
// it or reading its digest raises. The era may be null. New reference, or null with an error.
KeyObject* new_key(const TensorView& view, Era* era);

// Whether the key's shape, dtype and size are those of the view.
bool describes(KeyObject* key, const TensorView& view);

// Whether the key's device is that of the view.
bool on_device_of(const KeyObject* key, const TensorView& view);

// Takes back that the content is set: it is not what the tensor has.
void unseal(KeyObject* key);

// Computes digest and hash from the content. Touches no Python state: it may run without the GIL.
void seal(KeyObject* key);

// The same for a content whose digest is known.
void seal(KeyObject* key, const xxh3::Digest& digest);

}  // namespace otk::py
