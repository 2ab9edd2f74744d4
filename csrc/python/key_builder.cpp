#include "key_builder.h"

#include <memory>
#include <new>

#include "binding.h"
#include "torch_tensor.h"
#include "walk.h"

namespace otk::py {
namespace {

BuilderObject* as_builder(PyObject* object) { return reinterpret_cast<BuilderObject*>(object); }

// Runs `body`, which returns a new reference or null, and turns C++'s only exception here into Python's.
template <class Body>
PyObject* guard(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* hashable(PyObject* self, PyObject* object) {
  return guard([self, object]() -> PyObject* {
    BuilderObject* builder = as_builder(self);
    if (builder->era->is_over()) return PyObject_CallFunctionObjArgs(builder->hashable, object, nullptr);
    if (Walk* walk = Walk::current(builder)) return walk->hash_value(object);
    // Called by somebody else than upstream's _build_key: nobody would fill the keys later.
    Walk walk(builder);
    Ref value = Ref::steal(walk.hash_value(object));
    if (!value || walk.is_sentinel(value.get())) return value.release();
    if (!walk.fill()) return nullptr;
    return walk.reason == Reason::kNone ? value.release() : new_reference(builder->not_hashable);
  });
}

// The arguments of a vector call: `count` values, then one for each of `names`, which may be null.
struct VectorCall {
  PyObject* const* values;
  Py_ssize_t count;
  PyObject* names;
};

PyObject* call(PyObject* function, const VectorCall& given) {
  const Ref args = Ref::steal(PyTuple_New(given.count));
  const Ref kwargs = Ref::steal(PyDict_New());
  if (!args || !kwargs) return nullptr;
  for (Py_ssize_t i = 0; i < given.count; ++i) PyTuple_SetItem(args.get(), i, new_reference(given.values[i]));
  const Py_ssize_t named = given.names == nullptr ? 0 : PyTuple_Size(given.names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* value = given.values[given.count + i];
    if (PyDict_SetItem(kwargs.get(), PyTuple_GetItem(given.names, i), value) < 0) return nullptr;
  }
  return PyObject_Call(function, args.get(), kwargs.get());
}

// Upstream's own function, for what it alone knows how to bind.
PyObject* build_key_upstream(Walk& walk, const VectorCall& given) {
  Ref key = Ref::steal(call(walk.builder->build_key, given));
  if (!key || (key.get() != Py_None && !walk.fill())) return nullptr;
  if (key.get() != Py_None && walk.reason == Reason::kNone) return key.release();
  const Ref unknown = Ref::steal(PyUnicode_InternFromString(""));
  const char* reason = walk.reason == Reason::kNone ? "upstream" : reason_name(walk.reason);
  PyObject* model_tag = given.count > 1 ? given.values[1] : Py_None;
  return unknown ? bypass(walk.builder, model_tag, unknown.get(), reason) : nullptr;
}

PyObject* build_key(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return guard([self, given = VectorCall{values, count, names}]() -> PyObject* {
    BuilderObject* builder = as_builder(self);
    if (builder->era->is_over()) return call(builder->build_key, given);
    Walk walk(builder);
    if (builder->tensors_only || given.names != nullptr || given.count != 4) return build_key_upstream(walk, given);
    PyObject *signature = given.values[0], *model_tag = given.values[1];
    PyObject *args = given.values[2], *kwargs = given.values[3];
    const Ref compiled = builder->plans->find(builder, signature);
    if (!compiled) return nullptr;
    const BindingPlan* plan = BindingPlan::from(compiled);
    if (plan == nullptr || !plan->can_bind(args, kwargs)) return build_key_upstream(walk, given);
    return plan->build(walk, model_tag, args, kwargs);
  });
}

PyObject* builder_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const kNames[] = {"hashable",  "build_key", "not_hashable", "precomputed", "to_host",
                                       "max_bytes", "on_bypass", "tensors_only", nullptr};
  PyObject *hashable_fn, *build_key_fn, *not_hashable, *precomputed, *to_host, *on_bypass = Py_None;
  unsigned long long max_bytes;
  int tensors_only = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!OK|Op:KeyBuilder", const_cast<char**>(kNames), &hashable_fn,
                                   &build_key_fn, &not_hashable, &PyTuple_Type, &precomputed, &to_host, &max_bytes,
                                   &on_bypass, &tensors_only)) {
    return nullptr;
  }
  if (!find_torch()) return nullptr;
  Ref seq_tag = Ref::steal(PyUnicode_InternFromString("__seq__"));
  Ref bypassed = Ref::steal(PyDict_New());
  if (!seq_tag || !bypassed) return nullptr;
  auto plans = std::unique_ptr<BindingPlans>(new (std::nothrow) BindingPlans);
  Era* era = plans ? Era::begin() : nullptr;
  if (era == nullptr) return PyErr_NoMemory();
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) {
    era->release();
    return nullptr;
  }
  BuilderObject* builder = as_builder(self);
  builder->hashable = new_reference(hashable_fn);
  builder->build_key = new_reference(build_key_fn);
  builder->not_hashable = new_reference(not_hashable);
  builder->precomputed = new_reference(precomputed);
  builder->to_host = new_reference(to_host);
  builder->seq_tag = seq_tag.release();
  builder->bypassed = bypassed.release();
  builder->on_bypass = new_reference(on_bypass);
  builder->max_bytes = max_bytes;
  builder->era = era;
  builder->tensors_only = tensors_only != 0;
  builder->plans = plans.release();
  return self;
}

int builder_traverse(PyObject* self, visitproc visit, void* arg) {
  BuilderObject* builder = as_builder(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(builder->hashable);
  Py_VISIT(builder->build_key);
  Py_VISIT(builder->not_hashable);
  Py_VISIT(builder->precomputed);
  Py_VISIT(builder->to_host);
  Py_VISIT(builder->bypassed);
  Py_VISIT(builder->on_bypass);
  return 0;
}

int builder_clear(PyObject* self) {
  BuilderObject* builder = as_builder(self);
  Py_CLEAR(builder->hashable);
  Py_CLEAR(builder->build_key);
  Py_CLEAR(builder->not_hashable);
  Py_CLEAR(builder->precomputed);
  Py_CLEAR(builder->to_host);
  Py_CLEAR(builder->bypassed);
  Py_CLEAR(builder->on_bypass);
  Py_CLEAR(builder->seq_tag);
  return 0;
}

void builder_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  builder_clear(self);
  delete as_builder(self)->plans;
  as_builder(self)->era->release();
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* close(PyObject* self, PyObject*) {
  as_builder(self)->era->end();
  as_builder(self)->plans->clear();
  return new_reference(Py_None);
}

PyObject* bypassed(PyObject* self, PyObject*) { return PyDict_Copy(as_builder(self)->bypassed); }

PyMethodDef kMethods[] = {
    {"hashable", hashable, METH_O, "Upstream's _hashable(obj), with a TensorKey for each tensor that has one."},
    {"build_key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(build_key)), METH_FASTCALL | METH_KEYWORDS,
     "Upstream's _build_key(signature, model_tag, args, kwargs): a key, or None to bypass the cache."},
    {"close", close, METH_NOARGS,
     "From here on, answer as upstream does, and let the keys made so far equal nothing but themselves."},
    {"bypassed", bypassed, METH_NOARGS, "The calls that bypassed: {(model tag, argument name, reason): count}."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(builder_new)},
    {Py_tp_traverse, reinterpret_cast<void*>(builder_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(builder_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(builder_dealloc)},
    {Py_tp_methods, kMethods},
    {Py_tp_doc,
     const_cast<char*>("KeyBuilder(hashable, build_key, not_hashable, precomputed, to_host, max_bytes, on_bypass=None, "
                       "tensors_only=False)\n--\n\n"
                       "The stand-ins for one prompt-embedding cache module's key functions.")},
    {0, nullptr}};

PyType_Spec kSpec = {"omni_tensor_key._core.KeyBuilder", sizeof(BuilderObject), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, kSlots};

}  // namespace

PyObject* bypass(BuilderObject* builder, PyObject* model_tag, PyObject* name, const char* reason) {
  if (Py_TYPE(model_tag) != &PyUnicode_Type) return new_reference(Py_None);  // only a direct caller; not worth an error
  const Ref key = Ref::steal(Py_BuildValue("(OOs)", model_tag, name, reason));
  if (!key) return nullptr;
  PyObject* before = PyDict_GetItemWithError(builder->bypassed, key.get());  // borrowed
  if (before == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  const unsigned long long count = (before == nullptr ? 0 : PyLong_AsUnsignedLongLong(before)) + 1;
  const Ref after = Ref::steal(PyLong_FromUnsignedLongLong(count));
  if (!after || PyDict_SetItem(builder->bypassed, key.get(), after.get()) < 0) return nullptr;
  const bool power_of_16 = count > 1 && (count & (count - 1)) == 0 && __builtin_ctzll(count) % 4 == 0;
  if (power_of_16 && builder->on_bypass != Py_None) {
    const Ref done = Ref::steal(PyObject_CallFunctionObjArgs(builder->on_bypass, model_tag, name,
                                                             PyTuple_GetItem(key.get(), 2), after.get(), nullptr));
    if (!done) return nullptr;
  }
  return new_reference(Py_None);
}

PyTypeObject* make_key_builder_type() { return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kSpec)); }

}  // namespace otk::py
