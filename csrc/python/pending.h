// Keys that wait for their content. All tensors of a call are read in one go, after everything that could still make
// the call bypass the cache has been looked at.
#pragma once

#include <vector>

#include "python.h"
#include "tensor_key.h"

namespace otk::py {

// A tensor and its key.
struct PendingKey {
  Ref tensor;           // alive until its content has been read
  Ref key;              // null until the tensor has been looked at
  PyObject* argument;   // borrowed name of the call's argument that it came with, or null
  const uint8_t* data;  // of contiguous content, while it is being read
  KeyObject* object() const { return reinterpret_cast<KeyObject*>(key.get()); }
};

class PendingKeys {
 public:
  // The keys are of this era, which may be null, and which outlives this object.
  explicit PendingKeys(Era* era) : era_(era) {}

  // Takes a tensor without looking at it, which is cheaper: fill() or look() makes its key. The name of the argument
  // must outlive this object. Returns where it is, for at().
  size_t defer(PyObject* tensor, PyObject* argument);
  const PendingKey& at(size_t index) const { return items_[index]; }
  size_t size() const { return items_.size(); }

  // Looks at the tensors that were deferred; to be called before other code runs, which may change them. False with an
  // error set; `reason` says why the call must bypass instead.
  bool look(uint64_t max_bytes, Reason& reason) { return look_until(items_.size(), max_bytes, reason); }

  // A new reference to a key without content for a tensor that `view` describes; null with an error. The name of the
  // argument, which may be null, must outlive this object.
  PyObject* add(PyObject* tensor, const TensorView& view, PyObject* argument = nullptr);

  // Reads the content of every tensor added so far and seals the keys. CUDA tensors are read by the CUDA unit where
  // there is one. Other device tensors go through `to_host`, a callable that takes the list of them and returns their
  // host copies, or None to bypass. False with an error set; `reason` says why the call must bypass instead.
  bool fill(uint64_t max_bytes, PyObject* to_host, Reason& reason);

  // The one for which fill() or look() gave a reason; null where it concerns none in particular.
  const PendingKey* refused() const { return refused_; }

 private:
  bool look_until(size_t end, uint64_t max_bytes, Reason& reason);
  bool confirm(uint64_t max_bytes, Reason& reason);
  bool look_again(uint64_t max_bytes, Reason& reason);
  bool read_host(uint64_t max_bytes, Reason& reason);
  bool read_devices(uint64_t max_bytes, PyObject* to_host, Reason& reason);

  Era* const era_;
  std::vector<PendingKey> items_;
  const PendingKey* refused_ = nullptr;
  bool on_device_ = false;
};

}  // namespace otk::py
