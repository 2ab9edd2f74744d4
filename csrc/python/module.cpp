// The extension module omni_tensor_key._core.
#include <string.h>

#include <new>
#include <utility>

#include "../hash/xxh3_dispatch.h"
#include "cuda_read.h"
#include "key_builder.h"
#include "python.h"
#include "tensor_key.h"
#include "tensor_reader.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

PyObject* tensor_keys_impl(PyObject* tensors, PyObject* to_host, uint64_t max_bytes, CudaUse use) {
  const Ref items = Ref::steal(PySequence_Tuple(tensors));
  if (!items) return nullptr;
  const Py_ssize_t size = PyTuple_Size(items.get());
  TensorReader reader;
  Reason reason;
  for (Py_ssize_t i = 0; i < size; ++i) reader.add(PyTuple_GetItem(items.get(), i), nullptr);
  if (!reader.read(max_bytes, to_host, use, reason)) return nullptr;
  if (reason != Reason::kNone) {
    return Py_BuildValue("(ns)", static_cast<Py_ssize_t>(reader.refused()), reason_name(reason));
  }
  Ref keys = Ref::steal(PyList_New(size));
  for (Py_ssize_t i = 0; keys && i < size; ++i) {
    PyList_SetItem(keys.get(), i, new_reference(reader.key(static_cast<size_t>(i))));
  }
  return keys.release();
}

PyObject* tensor_keys(PyObject*, PyObject* args) {
  PyObject *tensors, *to_host, *cuda_unit = Py_None;
  unsigned long long max_bytes;
  if (!PyArg_ParseTuple(args, "OOK|O:tensor_keys", &tensors, &to_host, &max_bytes, &cuda_unit)) return nullptr;
  CudaUse use = CudaUse::kWhereRight;
  if (cuda_unit != Py_None) use = PyObject_IsTrue(cuda_unit) == 1 ? CudaUse::kAlways : CudaUse::kNever;
  if (PyErr_Occurred() != nullptr) return nullptr;
  try {
    return tensor_keys_impl(tensors, to_host, max_bytes, use);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
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

PyObject* set_cuda_functions(PyObject*, PyObject* args) {
  PyObject *check_cuda_unit, *note_host_copy;
  if (!PyArg_ParseTuple(args, "OO:set_cuda_functions", &check_cuda_unit, &note_host_copy)) return nullptr;
  // For the life of the process, as the module itself; that which was set before stays alive for a call that uses it.
  otk::py::set_cuda_functions(new_reference(check_cuda_unit), new_reference(note_host_copy));
  return new_reference(Py_None);
}

PyObject* cuda_stream(PyObject*, PyObject* index) {
  const long device = PyLong_AsLong(index);
  void* stream = nullptr;
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (!current_stream({kCudaDevice, static_cast<int32_t>(device)}, &stream)) return nullptr;
  return PyLong_FromVoidPtr(stream);
}

PyMethodDef kMethods[] = {
    {"tensor_keys", tensor_keys, METH_VARARGS,
     "tensor_keys(tensors, to_host, max_bytes, cuda_unit=None) -> list of TensorKey, or (index, reason) of the tensor "
     "that has none. cuda_unit: whether CUDA tensors are read by the unit; None: where it has been found right."},
    {"restore_key", restore_key, METH_VARARGS, "Makes a TensorKey of what its __reduce__() returned."},
    {"xxh3_128", xxh3_128, METH_VARARGS, "xxh3_128(data, simd_path) -> 16 bytes in canonical order"},
    {"set_cuda_functions", set_cuda_functions, METH_VARARGS,
     "set_cuda_functions(check_cuda_unit, note_host_copy): what the CUDA unit's first use on a device calls"},
    {"cuda_stream", cuda_stream, METH_O, "cuda_stream(index) -> address of the stream that torch's table tells"},
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
  if (!module || !make_tensor_key_type(module.get())) return nullptr;
  const Ref builder = Ref::steal(reinterpret_cast<PyObject*>(make_key_builder_type()));
  if (!builder || PyModule_AddObjectRef(module.get(), "KeyBuilder", builder.get()) < 0 ||
      PyModule_AddObjectRef(module.get(), "TensorKey", reinterpret_cast<PyObject*>(tensor_key_type)) < 0 ||
      !add_simd_paths(module.get()) || !add_cuda_build(module.get())) {
    return nullptr;
  }
  return module.release();
}
