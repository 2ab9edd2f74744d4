#include "torch_tensor.h"

namespace otk::py {
namespace {

// Found once, kept for the life of the process. Guarded by the GIL.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyObject* int8 = nullptr;
  PyObject* uint8 = nullptr;
  PyObject* mode_count = nullptr;         // returns the number of torch function modes; null: cannot be asked
  PyObject* without_functions = nullptr;  // context manager type that switches such modes off
  const dlpack::ExchangeApi* api = nullptr;
} torch;

Ref attribute(PyObject* object, const char* name) { return Ref::steal(PyObject_GetAttrString(object, name)); }

// The exchange table of torch.Tensor; null with an error that says what is wrong with it.
const dlpack::ExchangeApi* find_table(PyObject* tensor_type) {
  const Ref capsule = attribute(tensor_type, "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_SetString(PyExc_RuntimeError,
                    "omni_tensor_key needs torch 2.10 or newer: torch.Tensor has no DLPack "
                    "exchange table (__dlpack_c_exchange_api__)");
    return nullptr;
  }
  if (PyCapsule_IsValid(capsule.get(), dlpack::kCapsuleName) == 0) {
    PyErr_Format(
        PyExc_RuntimeError,
        "omni_tensor_key cannot read torch.Tensor.__dlpack_c_exchange_api__: it is %R, and not a capsule named "
        "'%s'",
        capsule.get(), dlpack::kCapsuleName);
    return nullptr;
  }
  const void* header = PyCapsule_GetPointer(capsule.get(), dlpack::kCapsuleName);
  const dlpack::ExchangeApi* api = usable_table(static_cast<const dlpack::ExchangeHeader*>(header));
  if (api == nullptr) {
    PyErr_Format(PyExc_RuntimeError,
                 "omni_tensor_key knows DLPack's exchange table in major version %d only, and torch offers none with "
                 "the function it needs",
                 static_cast<int>(dlpack::kMajorVersion));
  }
  return api;
}

bool find_torch_in(PyObject* module) {
  const Ref nn = attribute(module, "nn");
  const Ref c_module = attribute(module, "_C");
  if (!nn || !c_module) return false;
  Ref tensor = attribute(module, "Tensor");
  Ref parameter = attribute(nn.get(), "Parameter");
  Ref int8 = attribute(module, "int8");
  Ref uint8 = attribute(module, "uint8");
  Ref without_functions = attribute(c_module.get(), "DisableTorchFunction");
  if (!tensor || !parameter || !int8 || !uint8 || !without_functions) return false;
  const dlpack::ExchangeApi* api = find_table(tensor.get());
  if (api == nullptr) return false;
  Ref mode_count = attribute(c_module.get(), "_len_torch_function_stack");
  if (!mode_count) PyErr_Clear();
  torch.int8 = int8.release();
  torch.uint8 = uint8.release();
  torch.mode_count = mode_count.release();
  torch.without_functions = without_functions.release();
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor.release());
  torch.parameter = reinterpret_cast<PyTypeObject*>(parameter.release());
  torch.api = api;
  return true;
}

// The producer's error becomes a reason; running out of memory stays an error.
bool clear_producer_error() {
  if (PyErr_ExceptionMatches(PyExc_MemoryError)) return false;
  PyErr_Clear();
  return true;
}

// The table describes integers of 1 to 7 bits as if they had 8. Runs no other code, so that the view stays true.
bool check_width(PyObject* object, const TensorView& view, Reason& reason) {
  const bool is_integer = view.dtype.code == dlpack::kInt || view.dtype.code == dlpack::kUInt;
  if (view.dtype.bits != 8 || !is_integer) return true;
  const Ref dtype = attribute(object, "dtype");
  if (!dtype) {
    reason = Reason::kUnexportable;
    return clear_producer_error();
  }
  if (dtype.get() != torch.int8 && dtype.get() != torch.uint8) reason = Reason::kDtype;
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

bool is_tensor_subclass(PyObject* object) {
  return torch.tensor != nullptr && !is_exact_tensor(object) && PyType_IsSubtype(Py_TYPE(object), torch.tensor) != 0;
}

bool view_tensor(PyObject* object, uint64_t max_bytes, TensorView& view, Reason& reason) {
  if (!is_exact_tensor(object)) {
    reason = is_tensor_subclass(object) ? Reason::kSubclass : Reason::kNotATensor;
    return true;
  }
  dlpack::Tensor description{};
  // A success with an error set would come up at whatever is called next.
  if (torch.api->dltensor_from_py_object_no_sync(object, &description) != 0 || PyErr_Occurred() != nullptr) {
    reason = Reason::kUnexportable;
    return clear_producer_error();
  }
  reason = make_view(description, max_bytes, view);
  return reason != Reason::kNone || check_width(object, view, reason);
}

WithoutModes::WithoutModes() {
  if (!find_torch() || torch.api == nullptr) return;
  if (torch.mode_count != nullptr) {
    const Ref count = Ref::steal(PyObject_CallNoArgs(torch.mode_count));
    if (!count || PyLong_AsLong(count.get()) == 0) return;
  }
  Ref manager = Ref::steal(PyObject_CallNoArgs(torch.without_functions));
  const Ref entered = manager ? Ref::steal(PyObject_CallMethod(manager.get(), "__enter__", nullptr)) : Ref();
  if (entered) manager_ = std::move(manager);
}

WithoutModes::~WithoutModes() {
  if (!manager_) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const Ref done = Ref::steal(PyObject_CallMethod(manager_.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  PyErr_Restore(type, value, traceback);
}

bool current_stream(dlpack::Device device, void** stream) {
  if (torch.api == nullptr || torch.api->current_work_stream == nullptr) {
    PyErr_SetString(PyExc_NotImplementedError, "torch's DLPack table has no function that tells the current stream");
    return false;
  }
  if (torch.api->current_work_stream(device.type, device.id, stream) == 0) return true;
  if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, "torch could not tell the current stream");
  return false;
}

}  // namespace otk::py
