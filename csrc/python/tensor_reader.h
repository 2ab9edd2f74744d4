// The tensors of a call and their keys: all are described before any is read.
#pragma once

#include <vector>

#include "cuda_read.h"
#include "python.h"
#include "tensor_key.h"

namespace otk::py {

class TensorReader {
 public:
  // Takes an exact tensor without looking at it. `argument`, the name of the call's argument that it came with, is
  // borrowed and may be null.
  void add(PyObject* tensor, PyObject* argument);

  size_t size() const { return items_.size(); }

  // Describes all tensors, and where each can be keyed, reads them all. `to_host` is a callable that takes a list of
  // device tensors and returns their host copies, or None where the call must bypass. False with an error set; `reason`
  // says why there are no keys.
  bool read(uint64_t max_bytes, PyObject* to_host, CudaUse use, Reason& reason);

  // The tensor that read() had a reason against.
  size_t refused() const { return refused_; }

  PyObject* argument(size_t index) const { return items_[index].argument; }

  // After read(): borrowed.
  PyObject* key(size_t index) const { return items_[index].key.get(); }

  // The key of a tensor that was added. Fast where they are asked for in the order in which they were added.
  PyObject* key_of(PyObject* tensor);

 private:
  struct Item {
    Ref tensor;  // alive until its content has been read
    Ref key;
    PyObject* argument;
    KeyObject* object() const { return reinterpret_cast<KeyObject*>(key.get()); }
  };

  bool read_devices(const TensorView* views, uint64_t max_bytes, PyObject* to_host, CudaUse use, Reason& reason);
  bool copy_to_host(const std::vector<DeviceTensor>& tensors, uint64_t max_bytes, PyObject* to_host, Reason& reason);
  void hash_large() const;

  std::vector<Item> items_;
  size_t refused_ = 0;
  size_t next_ = 0;
};

}  // namespace otk::py
