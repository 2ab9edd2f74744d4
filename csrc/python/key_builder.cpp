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
    if (Walk* walk = Walk::current(builder)) return walk->hash_value(object);
    // Called by somebody else than a _build_key: nobody would put keys in the tensors' places later.
    Walk walk(builder);
    const Ref value = Ref::steal(walk.hash_value(object));
    if (!value || walk.is_sentinel(value.get())) return value ? new_reference(value.get()) : nullptr;
    if (!walk.read()) return nullptr;
    if (walk.is_refused()) return new_reference(builder->not_hashable);
    return walk.replace_tensors(value.get()).release();
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
  const Ref key = Ref::steal(call(walk.builder->build_key, given));
  if (!key) return nullptr;
  PyObject* model_tag = given.count > 1 ? given.values[1] : Py_None;
  walk.argument = nullptr;
  const bool is_tuple = PyTuple_Check(key.get()) != 0;
  if (!is_tuple && (key.get() == Py_None || walk.tensors.size() > 0)) {
    return walk.bypass(model_tag, walk.reason == Reason::kNone ? "upstream" : reason_name(walk.reason));
  }
  if (!walk.read()) return nullptr;
  if (walk.is_refused()) return walk.bypass(model_tag);
  if (!walk.state) return new_reference(key.get());
  const Ref keyed = walk.replace_tensors(key.get());
  const Ref state = Ref::steal(PyTuple_Pack(1, walk.state.get()));
  return keyed && state ? PySequence_Concat(keyed.get(), state.get()) : nullptr;
}

PyObject* build_key(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return guard([self, given = VectorCall{values, count, names}]() -> PyObject* {
    BuilderObject* builder = as_builder(self);
    Walk walk(builder);
    if (builder->tensors_only || given.names != nullptr || given.count != 4) return build_key_upstream(walk, given);
    PyObject *args = given.values[2], *kwargs = given.values[3];
    if (!BindingPlan::can_bind(args, kwargs)) return build_key_upstream(walk, given);
    const auto plan = builder->plans->find(builder, given.values[0]);
    if (plan) return plan->build(walk, given.values[1], args, kwargs);
    return PyErr_Occurred() == nullptr ? build_key_upstream(walk, given) : nullptr;
  });
}

PyObject* builder_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* const kNames[] = {"hashable",  "build_key", "not_hashable", "precomputed",  "plan", "call_state",
                                       "on_bypass", "to_host",   "max_bytes",    "tensors_only", nullptr};
  PyObject *hashable_fn, *build_key_fn, *not_hashable, *precomputed, *plan, *call_state, *on_bypass, *to_host;
  unsigned long long max_bytes;
  int tensors_only;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!OOOOKp:KeyBuilder", const_cast<char**>(kNames), &hashable_fn,
                                   &build_key_fn, &not_hashable, &PyTuple_Type, &precomputed, &plan, &call_state,
                                   &on_bypass, &to_host, &max_bytes, &tensors_only)) {
    return nullptr;
  }
  if (!find_torch()) return nullptr;
  Ref seq_tag = Ref::steal(PyUnicode_InternFromString("__seq__"));
  auto plans = std::unique_ptr<BindingPlans>(new (std::nothrow) BindingPlans);
  if (!seq_tag || !plans) return PyErr_NoMemory();
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  BuilderObject* builder = as_builder(self);
  builder->hashable = new_reference(hashable_fn);
  builder->build_key = new_reference(build_key_fn);
  builder->not_hashable = new_reference(not_hashable);
  builder->precomputed = new_reference(precomputed);
  builder->plan = new_reference(plan);
  builder->call_state = new_reference(call_state);
  builder->on_bypass = new_reference(on_bypass);
  builder->to_host = new_reference(to_host);
  builder->seq_tag = seq_tag.release();
  builder->max_bytes = max_bytes;
  builder->tensors_only = tensors_only != 0;
  builder->plans = plans.release();
  return self;
}

// The references that a cycle can go through: on_bypass and call_state may be methods of what has the builder.
template <class Visit>
int for_each_reference(BuilderObject* builder, Visit visit) {
  for (PyObject** reference :
       {&builder->hashable, &builder->build_key, &builder->not_hashable, &builder->precomputed, &builder->plan,
        &builder->call_state, &builder->on_bypass, &builder->to_host, &builder->seq_tag}) {
    if (const int result = visit(*reference)) return result;
  }
  return 0;
}

int builder_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return for_each_reference(as_builder(self), [visit, arg](PyObject* reference) {
    Py_VISIT(reference);
    return 0;
  });
}

int builder_clear(PyObject* self) {
  return for_each_reference(as_builder(self), [](PyObject*& reference) {
    Py_CLEAR(reference);
    return 0;
  });
}

void builder_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  builder_clear(self);
  delete as_builder(self)->plans;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMethodDef kMethods[] = {
    {"hashable", hashable, METH_O, "Upstream's _hashable(obj), with a TensorKey for each tensor that has one."},
    {"build_key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(build_key)), METH_FASTCALL | METH_KEYWORDS,
     "Upstream's _build_key(signature, model_tag, args, kwargs): a key, with the state of torch around the call at its "
     "end where the call has tensors, or None to bypass the cache."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(builder_new)},
    {Py_tp_traverse, reinterpret_cast<void*>(builder_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(builder_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(builder_dealloc)},
    {Py_tp_methods, kMethods},
    {Py_tp_doc,
     const_cast<char*>("KeyBuilder(hashable, build_key, not_hashable, precomputed, plan, call_state, on_bypass, "
                       "to_host, max_bytes, tensors_only)\n--\n\n"
                       "The stand-ins for one prompt-embedding cache module's key functions.")},
    {0, nullptr}};

PyType_Spec kSpec = {"omni_tensor_key._core.KeyBuilder", sizeof(BuilderObject), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, kSlots};

}  // namespace

PyTypeObject* make_key_builder_type() { return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kSpec)); }

}  // namespace otk::py
