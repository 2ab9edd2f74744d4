// Torch tensors as this extension sees them: two exact Python types and one C function table.
#pragma once

#include "../tensor_view.h"
#include "python.h"

namespace otk::py {

// Fills `view` from `object` if it is a torch tensor that can be keyed. Reads no element. Never leaves an error set,
// except a MemoryError and the one of a torch without a usable exchange table: then it returns false.
//
// Other threads may run in here, and could free the tensor's storage: before its content is read, view_tensor() must
// look again.
bool read_tensor(PyObject* object, uint64_t max_bytes, TensorView& view, Reason& reason);

// Looks again at an exact tensor that read_tensor() has accepted. Keeps the GIL and runs no Python code, so that a copy
// made right afterwards reads what the view describes.
bool view_tensor(PyObject* object, uint64_t max_bytes, TensorView& view, Reason& reason);

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
