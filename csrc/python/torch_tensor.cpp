#include "torch_tensor.h"

namespace otk::py {
namespace {

// Found once, kept for the life of the process. Guarded by the GIL.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyTypeObject* dtype = nullptr;
  PyTypeObject* device = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* is_neg = nullptr;  // interned method name
} torch;

Ref attribute(PyObject* object, const char* name) { return Ref::steal(PyObject_GetAttrString(object, name)); }

bool find_torch_in(PyObject* module) {
  const Ref nn = attribute(module, "nn");
  if (!nn) return false;
  Ref tensor = attribute(module, "Tensor");
  Ref parameter = attribute(nn.get(), "Parameter");
  Ref dtype = attribute(module, "dtype");
  Ref device = attribute(module, "device");
  if (!tensor || !parameter || !dtype || !device) return false;
  const Ref capsule = attribute(tensor.get(), "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_SetString(PyExc_RuntimeError,
                    "omni_tensor_key needs torch 2.10 or newer: torch.Tensor has no DLPack "
                    "exchange table (__dlpack_c_exchange_api__)");
    return false;
  }
  void* header = PyCapsule_GetPointer(capsule.get(), dlpack::kCapsuleName);
  if (header == nullptr) return false;
  const dlpack::ExchangeApi* api = usable_table(static_cast<const dlpack::ExchangeHeader*>(header));
  if (api == nullptr) {
    PyErr_Format(PyExc_RuntimeError,
                 "omni_tensor_key knows DLPack's exchange table in major version %d only, and torch offers none with "
                 "the function it needs",
                 static_cast<int>(dlpack::kMajorVersion));
    return false;
  }
  torch.is_neg = PyUnicode_InternFromString("is_neg");
  if (torch.is_neg == nullptr) return false;
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor.release());
  torch.parameter = reinterpret_cast<PyTypeObject*>(parameter.release());
  torch.dtype = reinterpret_cast<PyTypeObject*>(dtype.release());
  torch.device = reinterpret_cast<PyTypeObject*>(device.release());
  torch.api = api;
  return true;
}

// The producer's error becomes a reason; running out of memory stays an error.
bool clear_producer_error() {
  if (PyErr_ExceptionMatches(PyExc_MemoryError)) return false;
  PyErr_Clear();
  return true;
}

}  // namespace

bool find_torch() {
  if (torch.api != nullptr) return true;
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  PyObject* module = PyDict_GetItemString(modules, "torch");
  return module == nullptr || find_torch_in(module);
}

bool is_exact_tensor(PyObject* object) {
  const PyTypeObject* type = Py_TYPE(object);
  return type == torch.tensor || type == torch.parameter;
}

bool is_torch_constant(PyObject* object) {
  const PyTypeObject* type = Py_TYPE(object);
  return type == torch.dtype || type == torch.device;
}

Reason refusal_of(PyObject* object) {
  const bool subclass = torch.tensor != nullptr && PyType_IsSubtype(Py_TYPE(object), torch.tensor) != 0;
  return subclass ? Reason::kSubclass : Reason::kNotATensor;
}

bool read_tensor(PyObject* object, uint64_t max_bytes, TensorView& view, Reason& reason) {
  if (!find_torch()) return false;
  if (!is_exact_tensor(object)) {
    reason = refusal_of(object);
    return true;
  }
  dlpack::Tensor description{};
  if (torch.api->dltensor_from_py_object_no_sync(object, &description) != 0) {
    reason = Reason::kUnexportable;
    return clear_producer_error();
  }
  reason = make_view(description, max_bytes, view);
  if (reason != Reason::kNone || view.nbytes == 0) return true;
  // The table describes a lazily negated tensor as if it were not negated.
  const Ref negated = Ref::steal(PyObject_CallMethodObjArgs(object, torch.is_neg, nullptr));
  if (!negated) {
    reason = Reason::kUnexportable;
    return clear_producer_error();
  }
  if (negated.get() != Py_False) reason = Reason::kNegated;
  return true;
}

}  // namespace otk::py
