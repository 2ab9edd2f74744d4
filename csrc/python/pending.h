// Keys that wait for their content. All tensors of a call are read in one go, after everything that could still make
// the call bypass the cache has been looked at.
#pragma once

#include <vector>

#include "python.h"
#include "tensor_key.h"

namespace otk::py {

class PendingKeys {
 public:
  // A new reference to a key without content for a tensor that `view` describes; null with an error.
  PyObject* add(PyObject* tensor, const TensorView& view);

  // Other code may have run since tensors were added, so their addresses may be stale: fill() looks at each again.
  void distrust_views() { trusted_ = false; }

  // Reads the content of every tensor added so far and seals the keys. Device tensors go through `to_host`, a callable
  // that takes the list of them and returns their host copies, or None to bypass. False with an error set; `reason`
  // says why the call must bypass instead.
  bool fill(uint64_t max_bytes, PyObject* to_host, Reason& reason);

 private:
  struct Item {
    Ref tensor;  // alive until its content has been read
    Ref key;
    bool contiguous;
    KeyObject* key_object() const { return reinterpret_cast<KeyObject*>(key.get()); }
  };
  bool read_host(uint64_t max_bytes, Reason& reason);
  bool read_devices(uint64_t max_bytes, PyObject* to_host, Reason& reason);

  std::vector<Item> items_;
  bool trusted_ = true;
  bool on_device_ = false;
};

}  // namespace otk::py
