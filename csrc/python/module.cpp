// The extension module omni_tensor_key._core.
#include <string.h>

#include <new>
#include <utility>

#include "../xxh3_dispatch.h"
#include "cuda_read.h"
#include "key_builder.h"
#include "pending.h"
#include "python.h"
#include "tensor_key.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// Raises omni_tensor_key.UncacheableTensorError; the text is composed in Python, where the object can be asked.
void raise_uncacheable(PyObject* object, Reason reason, uint64_t max_bytes) {
  const Ref errors = Ref::steal(PyImport_ImportModule("omni_tensor_key.errors"));
  if (!errors) return;
  const Ref error = Ref::steal(PyObject_CallMethod(errors.get(), "uncacheable", "OsK", object, reason_name(reason),
                                                   static_cast<unsigned long long>(max_bytes)));
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
}

PyObject* tensor_keys_impl(PyObject* tensors, PyObject* to_host, uint64_t max_bytes) {
  const Ref items = Ref::steal(PySequence_Tuple(tensors));
  if (!items) return nullptr;
  const Py_ssize_t size = PyTuple_Size(items.get());
  Ref keys = Ref::steal(PyList_New(0));
  if (!keys) return nullptr;
  PendingKeys pending(nullptr);
  Reason reason;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* tensor = PyTuple_GetItem(items.get(), i);  // borrowed
    TensorView view;
    if (!view_tensor(tensor, max_bytes, view, reason)) return nullptr;
    if (reason != Reason::kNone) {
      raise_uncacheable(tensor, reason, max_bytes);
      return nullptr;
    }
    const Ref key = Ref::steal(pending.add(tensor, view));
    if (!key || PyList_Append(keys.get(), key.get()) < 0) return nullptr;
  }
  if (!pending.fill(max_bytes, to_host, reason)) return nullptr;
  if (reason == Reason::kNone) return keys.release();
  const PendingKey* refused = pending.refused();
  raise_uncacheable(refused ? refused->tensor.get() : PyTuple_GetItem(items.get(), 0), reason, max_bytes);
  return nullptr;
}

PyObject* tensor_keys(PyObject*, PyObject* args) {
  PyObject *tensors, *to_host;
  unsigned long long max_bytes;
  if (!PyArg_ParseTuple(args, "OOK:tensor_keys", &tensors, &to_host, &max_bytes)) return nullptr;
  try {
    return tensor_keys_impl(tensors, to_host, max_bytes);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// Appends the sources of the TensorKeys in `key` to `found`; whether there is one. An error may be set.
bool collect_sources(PyObject* key, PyObject* found) {
  if (Py_TYPE(key) == tensor_key_type) {
    const auto* object = reinterpret_cast<KeyObject*>(key);
    const Ref source = Ref::steal(PyLong_FromUnsignedLongLong(object->source));
    if (source && object->source != 0) PyList_Append(found, source.get());
    return true;
  }
  bool any = false;
  if (Py_TYPE(key) != &PyTuple_Type) return any;
  const Py_ssize_t size = PyTuple_Size(key);
  for (Py_ssize_t i = 0; i < size && PyErr_Occurred() == nullptr; ++i) {
    any |= collect_sources(PyTuple_GetItem(key, i), found);
  }
  return any;
}

PyObject* sources(PyObject*, PyObject* key) {
  Ref found = Ref::steal(PyList_New(0));
  if (!found) return nullptr;
  const bool any = collect_sources(key, found.get());
  if (PyErr_Occurred() != nullptr) return nullptr;
  return any ? found.release() : new_reference(Py_None);
}

PyObject* xxh3_128(PyObject*, PyObject* args) {
  const char *data, *name;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "y#s:xxh3_128", &data, &size, &name)) return nullptr;
  const xxh3::SimdPaths& paths = xxh3::simd_paths();
  for (size_t i = 0; i < paths.count; ++i) {
    if (strcmp(name, paths.path[i].name) != 0) continue;
    const xxh3::Canonical digest = canonical(xxh3::hash(data, static_cast<size_t>(size), paths.path[i].run));
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digest.bytes), sizeof digest.bytes);
  }
  return PyErr_Format(PyExc_ValueError, "this CPU has no SIMD path '%s'", name);
}

PyObject* use_cuda_unit(PyObject*, PyObject* wanted) {
  const int value = PyObject_IsTrue(wanted);
  if (value < 0) return nullptr;
  const bool before = cuda_unit_used();
  cuda_unit_wanted = value == 1;
  return PyBool_FromLong(before);
}

PyMethodDef kMethods[] = {
    {"tensor_keys", tensor_keys, METH_VARARGS, "tensor_keys(tensors, to_host, max_bytes) -> list of TensorKey"},
    {"sources", sources, METH_O,
     "The addresses from which the TensorKeys in a key were read, or None for a key without one."},
    {"xxh3_128", xxh3_128, METH_VARARGS, "xxh3_128(data, simd_path) -> 16 bytes in canonical order"},
    {"use_cuda_unit", use_cuda_unit, METH_O,
     "use_cuda_unit(wanted) -> bool, whether this thread's CUDA tensors went through the unit"},
    {nullptr, nullptr, 0, nullptr}};

bool add_simd_paths(PyObject* module) {
  const xxh3::SimdPaths& paths = xxh3::simd_paths();
  Ref names = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(paths.count)));
  if (!names) return false;
  for (size_t i = 0; i < paths.count; ++i) {
    PyObject* name = PyUnicode_FromString(paths.path[i].name);
    if (name == nullptr || PyTuple_SetItem(names.get(), static_cast<Py_ssize_t>(i), name) < 0) return false;
  }
  return PyModule_AddObjectRef(module, "SIMD_PATHS", names.get()) == 0;
}

bool add_cuda_build(PyObject* module) {
  const Ref text = cuda_build == nullptr ? Ref::borrow(Py_None) : Ref::steal(PyUnicode_FromString(cuda_build));
  return text && PyModule_AddObjectRef(module, "CUDA_BUILD", text.get()) == 0;
}

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "omni_tensor_key._core",
                       "The native content hash and key builder.",
                       -1,  // process-wide state: the types and torch's table
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace
}  // namespace otk::py

PyMODINIT_FUNC PyInit__core() {
  using namespace otk::py;
  Ref module = Ref::steal(PyModule_Create(&kModule));
  if (!module || !make_tensor_key_type()) return nullptr;
  const Ref builder = Ref::steal(reinterpret_cast<PyObject*>(make_key_builder_type()));
  if (!builder || PyModule_AddObjectRef(module.get(), "KeyBuilder", builder.get()) < 0 ||
      PyModule_AddObjectRef(module.get(), "TensorKey", reinterpret_cast<PyObject*>(tensor_key_type)) < 0 ||
      !add_simd_paths(module.get()) || !add_cuda_build(module.get())) {
    return nullptr;
  }
  return module.release();
}
