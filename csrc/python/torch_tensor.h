// Torch tensors as this extension sees them: two exact Python types and one C function table.
#pragma once

#include "../tensor_view.h"
#include "python.h"

namespace otk::py {

// Fills `view` from `object` if it is a torch tensor that can be keyed, as far as torch's table tells. Reads no
// element. Keeps the GIL and runs no Python code, so that a copy made right afterwards reads what the view describes.
// False with an error set: no memory, or a torch without a usable table.
bool view_tensor(PyObject* object, uint64_t max_bytes, TensorView& view, Reason& reason);

// While it lives, a torch function mode of the caller does not see what a tensor is asked: its Python code could free
// storage that is about to be read. Where an error is set after construction, it was not possible.
class WithoutModes {
 public:
  WithoutModes();
  ~WithoutModes();
  WithoutModes(const WithoutModes&) = delete;
  WithoutModes& operator=(const WithoutModes&) = delete;

 private:
  Ref manager_;
};

// The table describes a lazily negated tensor as if it were not negated. This asks an exact tensor, under WithoutModes.
// False with a MemoryError set.
//
// Other threads may run in here, and could free the tensor's storage: what view_tensor() said before is void.
bool confirm_tensor(PyObject* object, Reason& reason);

// The table describes integers of 1 to 7 bits as if they had 8. This asks an exact tensor, under WithoutModes, without
// running other code, so that the view stays true. False with a MemoryError set.
bool confirm_width(PyObject* object, const TensorView& view, Reason& reason);

// The stream on which torch queues this thread's work for a CUDA device; not `known` where the table cannot tell. False
// with an error set.
bool current_cuda_stream(int32_t device_id, void** stream, bool& known);

// Why an object that is no exact tensor has no key.
Reason refusal_of(PyObject* object);

// Whether `object` is a torch.dtype or a torch.device: immutable values that upstream turns into strings.
bool is_torch_constant(PyObject* object);

// Whether the exact type of `object` is torch.Tensor or torch.nn.Parameter. False too while torch is not imported.
bool is_exact_tensor(PyObject* object);

// Finds torch's types and table; false with an error where torch has no table that this extension knows. True without
// an effect while torch is not imported.
bool find_torch();

}  // namespace otk::py
