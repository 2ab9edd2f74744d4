// Torch tensors as this extension sees them: two exact Python types and one C function table.
#pragma once

#include "../tensor/tensor_view.h"
#include "python.h"

namespace otk::py {

// Fills `view` from `object` if it is a torch tensor that can be keyed. Reads no element. Under WithoutModes it keeps
// the GIL and runs no Python code, so that a copy made right afterwards reads what the view describes. False with an
// error set: no memory. After find_torch(), or under WithoutModes.
bool view_tensor(PyObject* object, uint64_t max_bytes, TensorView& view, Reason& reason);

// While it lives, a torch function mode of the caller does not see what a tensor is asked: its Python code could free
// storage that is about to be read. Finds torch first. Where an error is set after construction, it was not possible.
class WithoutModes {
 public:
  WithoutModes();
  ~WithoutModes();
  WithoutModes(const WithoutModes&) = delete;
  WithoutModes& operator=(const WithoutModes&) = delete;

 private:
  Ref manager_;
};

// The stream on which torch queues this thread's work for a device. False with an error set, which is a
// NotImplementedError where the table cannot tell.
bool current_stream(dlpack::Device device, void** stream);

// Whether `object` is an instance of a subclass of torch.Tensor other than torch.nn.Parameter.
bool is_tensor_subclass(PyObject* object);

// Whether the exact type of `object` is torch.Tensor or torch.nn.Parameter. False too while torch is not imported.
bool is_exact_tensor(PyObject* object);

// Finds torch's types and table; false with an error where torch has no table that this extension knows. True without
// an effect while torch is not imported.
bool find_torch();

}  // namespace otk::py
