#include "walk.h"

#include <vector>

#include "torch_tensor.h"

namespace otk::py {
namespace {

thread_local Walk* current_walk = nullptr;

bool holds_tensor(PyObject* value) {
  if (is_exact_tensor(value)) return true;
  const Py_ssize_t size = Py_TYPE(value) == &PyTuple_Type ? PyTuple_Size(value) : 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (holds_tensor(PyTuple_GetItem(value, i))) return true;
  }
  return false;
}

// The tuple with what `map` makes of its items. The tuple itself where it changes none. A new one is made last: Python
// code that runs meanwhile could find an unfinished one. `map` ends it with null, or with the sentinel.
template <class Map>
Ref map_tuple(Ref items, PyObject* sentinel, Map map) {
  const Py_ssize_t size = PyTuple_Size(items.get());
  std::vector<Ref> changed;  // once there is an item that changes
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyTuple_GetItem(items.get(), i);  // borrowed
    if (is_exact_scalar(item)) {
      if (!changed.empty()) changed.push_back(Ref::borrow(item));
      continue;
    }
    Ref value = map(item);
    if (!value || value.get() == sentinel) return value;
    if (changed.empty()) {
      changed.reserve(static_cast<size_t>(size));
      for (Py_ssize_t k = 0; k < i; ++k) changed.push_back(Ref::borrow(PyTuple_GetItem(items.get(), k)));
    }
    changed.push_back(std::move(value));
  }
  if (changed.empty()) return items;
  Ref tuple = Ref::steal(PyTuple_New(size));
  for (Py_ssize_t i = 0; tuple && i < size; ++i) {
    PyTuple_SetItem(tuple.get(), i, changed[static_cast<size_t>(i)].release());
  }
  return tuple;
}

}  // namespace

bool is_exact_scalar(PyObject* object) {
  const PyTypeObject* type = Py_TYPE(object);
  return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBool_Type || type == &PyFloat_Type ||
         type == &PyBytes_Type || object == Py_None;
}

Ref Walk::hash_items(Ref items) {
  return map_tuple(std::move(items), builder->not_hashable,
                   [this](PyObject* item) { return Ref::steal(hash_value(item)); });
}

PyObject* Walk::hash_sequence(PyObject* object) {
  // A list is copied first: what runs while its items are walked may change it.
  Ref items = Py_TYPE(object) == &PyList_Type ? Ref::steal(PyList_AsTuple(object)) : Ref::borrow(object);
  if (!items || Py_EnterRecursiveCall(" while keying a nested sequence") != 0) return nullptr;
  Ref hashed = hash_items(std::move(items));
  Py_LeaveRecursiveCall();
  if (!hashed || is_sentinel(hashed.get())) return hashed.release();
  return PyTuple_Pack(2, builder->seq_tag, hashed.get());
}

PyObject* Walk::hash_other(PyObject* object) {
  const size_t before = tensors.size();
  Ref value = Ref::steal(PyObject_CallFunctionObjArgs(builder->hashable, object, nullptr));
  if (!value) return nullptr;
  const bool is_container = PyList_Check(object) || PyTuple_Check(object) || PyDict_Check(object);
  // Upstream unpacks a numpy array of one object: a tensor in there is as little a key as the array is.
  if (tensors.size() > before && !is_container && holds_tensor(value.get())) return refuse(Reason::kNotATensor);
  // A nested value that was refused has set its own reason: upstream came back here for it.
  if (is_sentinel(value.get()) && reason == Reason::kNone) reason = Reason::kNotATensor;
  return value.release();
}

PyObject* Walk::refuse(Reason why) {
  reason = why;
  return new_reference(builder->not_hashable);
}

PyObject* Walk::hash_value(PyObject* object) {
  if (is_exact_tensor(object)) {
    tensors.add(object, argument);
    return new_reference(object);
  }
  const PyTypeObject* type = Py_TYPE(object);
  if (!builder->tensors_only) {
    if (is_exact_scalar(object)) return new_reference(object);
    if (type == &PyList_Type || type == &PyTuple_Type) return hash_sequence(object);
  }
  return is_tensor_subclass(object) ? refuse(Reason::kSubclass) : hash_other(object);
}

bool Walk::read() {
  // Code that runs from here on and asks for a key gets a walk of its own.
  current_walk = nullptr;
  reason = Reason::kNone;
  if (tensors.size() == 0) return true;
  argument = tensors.argument(0);
  state = Ref::steal(PyObject_CallNoArgs(builder->call_state));
  if (!state) return false;
  if (is_refused()) return true;
  if (!tensors.read(builder->max_bytes, builder->to_host, CudaUse::kWhereRight, reason)) return false;
  if (reason != Reason::kNone) argument = tensors.argument(tensors.refused());
  return true;
}

Ref Walk::replace_tensors(PyObject* value) {
  if (is_exact_tensor(value)) return Ref::borrow(tensors.key_of(value));
  if (Py_TYPE(value) != &PyTuple_Type) return Ref::borrow(value);
  if (Py_EnterRecursiveCall(" while keying a nested sequence") != 0) return Ref();
  Ref replaced = map_tuple(Ref::borrow(value), nullptr, [this](PyObject* item) { return replace_tensors(item); });
  Py_LeaveRecursiveCall();
  return replaced;
}

PyObject* Walk::bypass(PyObject* model_tag, const char* why) {
  current_walk = nullptr;
  const Ref text =
      state && PyUnicode_Check(state.get()) ? Ref::borrow(state.get()) : Ref::steal(PyUnicode_FromString(why));
  const Ref name = argument == nullptr ? Ref::steal(PyUnicode_FromString("")) : Ref::borrow(argument);
  if (!text || !name) return nullptr;
  const Ref told =
      Ref::steal(PyObject_CallFunctionObjArgs(builder->on_bypass, model_tag, name.get(), text.get(), nullptr));
  return told ? new_reference(Py_None) : nullptr;
}

PyObject* Walk::bypass(PyObject* model_tag) { return bypass(model_tag, reason_name(reason)); }

Walk::Walk(BuilderObject* owner) : builder(owner), outer_(current_walk) { current_walk = this; }

Walk::~Walk() { current_walk = outer_; }

Walk* Walk::current(BuilderObject* builder) {
  return current_walk != nullptr && current_walk->builder == builder ? current_walk : nullptr;
}

}  // namespace otk::py
