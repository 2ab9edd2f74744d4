#include "tensor_key.h"

#include <stdio.h>
#include <string.h>

#include "../hash/xxh3_dispatch.h"

namespace otk::py {

PyTypeObject* tensor_key_type = nullptr;

namespace {

PyObject* restore_function = nullptr;

KeyObject* as_key(PyObject* object) { return reinterpret_cast<KeyObject*>(object); }

bool equal(KeyObject* a, KeyObject* b) {
  // The digest only makes the common answer fast. XXH3 has known collisions, so the bytes decide.
  return a->digest.low == b->digest.low && a->digest.high == b->digest.high && a->nbytes == b->nbytes &&
         a->dtype.code == b->dtype.code && a->dtype.bits == b->dtype.bits && a->device.type == b->device.type &&
         a->device.id == b->device.id && a->ndim == b->ndim &&
         memcmp(a->shape(), b->shape(), sizeof(int64_t) * a->ndim) == 0 &&
         memcmp(a->content(), b->content(), a->nbytes) == 0;
}

PyObject* rich_compare(PyObject* self, PyObject* other, int op) {
  if (Py_TYPE(other) != tensor_key_type || (op != Py_EQ && op != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
  return PyBool_FromLong((self == other || equal(as_key(self), as_key(other))) == (op == Py_EQ));
}

Py_hash_t hash(PyObject* self) { return as_key(self)->hash; }

PyObject* get_digest(PyObject* self, void*) {
  const xxh3::Canonical digest = xxh3::canonical(as_key(self)->digest);
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digest.bytes), sizeof digest.bytes);
}

PyObject* get_hexdigest(PyObject* self, void*) {
  char text[33];
  snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(as_key(self)->digest.high),
           static_cast<unsigned long long>(as_key(self)->digest.low));
  return PyUnicode_FromString(text);
}

PyObject* get_dtype(PyObject* self, void*) { return PyUnicode_FromString(dtype_name(as_key(self)->dtype)); }

PyObject* get_shape(PyObject* self, void*) {
  KeyObject* key = as_key(self);
  Ref shape = Ref::steal(PyTuple_New(key->ndim));
  if (!shape) return nullptr;
  for (int32_t i = 0; i < key->ndim; ++i) {
    PyObject* size = PyLong_FromLongLong(key->shape()[i]);
    if (size == nullptr || PyTuple_SetItem(shape.get(), i, size) < 0) return nullptr;
  }
  return shape.release();
}

PyObject* get_device(PyObject* self, void*) {
  const dlpack::Device device = as_key(self)->device;
  if (device.type == dlpack::kCpu) return PyUnicode_FromString(device_name(device.type));
  return PyUnicode_FromFormat("%s:%d", device_name(device.type), static_cast<int>(device.id));
}

PyObject* get_nbytes(PyObject* self, void*) { return PyLong_FromUnsignedLongLong(as_key(self)->nbytes); }

PyObject* repr(PyObject* self) {
  const Ref digest = Ref::steal(get_hexdigest(self, nullptr));
  const Ref dtype = Ref::steal(get_dtype(self, nullptr));
  const Ref shape = Ref::steal(get_shape(self, nullptr));
  const Ref device = Ref::steal(get_device(self, nullptr));
  if (!digest || !dtype || !shape || !device) return nullptr;
  return PyUnicode_FromFormat("TensorKey(%U, %U, %S, %U)", digest.get(), dtype.get(), shape.get(), device.get());
}

PyObject* reduce(PyObject* self, PyObject*) {
  KeyObject* key = as_key(self);
  const Ref shape = Ref::steal(get_shape(self, nullptr));
  if (!shape) return nullptr;
  return Py_BuildValue("(O(iiiiOy#))", restore_function, int{key->dtype.code}, int{key->dtype.bits},
                       static_cast<int>(key->device.type), static_cast<int>(key->device.id), shape.get(),
                       reinterpret_cast<const char*>(key->content()), static_cast<Py_ssize_t>(key->nbytes));
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyMethodDef kMethods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyGetSetDef kGetSet[] = {
    {"digest", get_digest, nullptr, "XXH3-128 of the content, seed 0: 16 bytes in canonical order.", nullptr},
    {"hexdigest", get_hexdigest, nullptr, "The digest as 32 hexadecimal digits.", nullptr},
    {"dtype", get_dtype, nullptr, "The dtype's name in torch, such as 'int64'.", nullptr},
    {"shape", get_shape, nullptr, "The tensor's shape, a tuple of int.", nullptr},
    {"device", get_device, nullptr, "'cpu', or the device type and index, such as 'cuda:0'.", nullptr},
    {"nbytes", get_nbytes, nullptr, "The content's size in bytes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot kSlots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                        {Py_tp_hash, reinterpret_cast<void*>(hash)},
                        {Py_tp_richcompare, reinterpret_cast<void*>(rich_compare)},
                        {Py_tp_repr, reinterpret_cast<void*>(repr)},
                        {Py_tp_methods, kMethods},
                        {Py_tp_getset, kGetSet},
                        {Py_tp_doc, const_cast<char*>("A tensor's content, dtype, shape and device as a dictionary "
                                                      "key; made by tensor_key().")},
                        {0, nullptr}};

PyType_Spec kSpec = {"omni_tensor_key.TensorKey", sizeof(KeyObject), 1,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, kSlots};

// The parts of a key, from another process or a damaged file; nothing about them is sure.
PyObject* restore(int code, int bits, dlpack::Device device, PyObject* sizes, const char* content, Py_ssize_t nbytes) {
  const Py_ssize_t ndim = PyTuple_Size(sizes);
  if (ndim > kMaxDims || code < 0 || code > UINT8_MAX || bits < 0 || bits > UINT8_MAX) return nullptr;
  int64_t shape[kMaxDims];
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    shape[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  dlpack::Tensor tensor{};
  tensor.data = const_cast<char*>(content);
  tensor.device = device;
  tensor.ndim = static_cast<int32_t>(ndim);
  tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  tensor.shape = shape;
  TensorView view;
  if (make_view(tensor, INT64_MAX, view) != Reason::kNone || view.nbytes != static_cast<uint64_t>(nbytes)) {
    return nullptr;
  }
  KeyObject* key = new_key(view);
  if (key != nullptr) seal(key, xxh3::copy_and_hash(key->content(), content, view.nbytes));
  return reinterpret_cast<PyObject*>(key);
}

}  // namespace

bool make_tensor_key_type(PyObject* module) {
  restore_function = PyObject_GetAttrString(module, "restore_key");
  tensor_key_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kSpec));
  return restore_function != nullptr && tensor_key_type != nullptr;
}

PyObject* restore_key(PyObject*, PyObject* args) {
  int code, bits;
  dlpack::Device device;
  PyObject* shape;
  const char* content;
  Py_ssize_t nbytes;
  PyObject* key = nullptr;
  if (PyArg_ParseTuple(args, "iiiiO!y#:restore_key", &code, &bits, &device.type, &device.id, &PyTuple_Type, &shape,
                       &content, &nbytes) != 0) {
    key = restore(code, bits, device, shape, content, nbytes);
  }
  if (key != nullptr || (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_MemoryError) != 0)) return key;
  PyErr_SetString(PyExc_ValueError, "these are not the parts of a TensorKey: they are damaged, or of another format");
  return nullptr;
}

KeyObject* new_key(const TensorView& view) {
  const size_t extra = sizeof(int64_t) * view.ndim + view.nbytes;
  // Not PyType_GenericAlloc: it would clear the content, which is written in full before anything reads it.
  auto* key = static_cast<KeyObject*>(PyObject_Malloc(sizeof(KeyObject) + extra));
  if (key == nullptr) {
    PyErr_NoMemory();
    return nullptr;
  }
  PyObject_InitVar(reinterpret_cast<PyVarObject*>(key), tensor_key_type, static_cast<Py_ssize_t>(extra));
  key->hash = KeyObject::kUnsealed;
  key->nbytes = view.nbytes;
  key->device = view.device;
  key->dtype = view.dtype;
  key->ndim = view.ndim;
  memcpy(key->shape(), view.shape, sizeof(int64_t) * view.ndim);
  return key;
}

bool describes(KeyObject* key, const TensorView& view) {
  return key->nbytes == view.nbytes && key->ndim == view.ndim && key->dtype.code == view.dtype.code &&
         key->dtype.bits == view.dtype.bits && memcmp(key->shape(), view.shape, sizeof(int64_t) * view.ndim) == 0;
}

bool on_device_of(const KeyObject* key, const TensorView& view) {
  return key->device.type == view.device.type && key->device.id == view.device.id;
}

void seal(KeyObject* key, const xxh3::Digest& digest) {
  key->digest = digest;
  // hash() covers every field that == compares, in fixed-width little-endian words; see docs/key_format.md.
  const uint64_t fields[] = {key->digest.low,
                             key->digest.high,
                             key->dtype.code,
                             key->dtype.bits,
                             static_cast<uint64_t>(int64_t{key->device.type}),
                             static_cast<uint64_t>(int64_t{key->device.id}),
                             static_cast<uint64_t>(key->ndim)};
  uint64_t words[7 + kMaxDims];  // not cleared: most keys use a few
  memcpy(words, fields, sizeof fields);
  memcpy(words + 7, key->shape(), sizeof(int64_t) * key->ndim);
  const auto low = static_cast<Py_hash_t>(xxh3::hash(words, sizeof(uint64_t) * (7 + key->ndim)).low);
  key->hash = low == -1 ? -2 : low;
}

}  // namespace otk::py
