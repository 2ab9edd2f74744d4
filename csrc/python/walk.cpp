#include "walk.h"

#include <vector>

#include "torch_tensor.h"

namespace otk::py {
namespace {

thread_local Walk* current_walk = nullptr;

bool holds_tensor_key(PyObject* value) {
  if (Py_TYPE(value) == tensor_key_type) return true;
  const Py_ssize_t size = Py_TYPE(value) == &PyTuple_Type ? PyTuple_Size(value) : 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (holds_tensor_key(PyTuple_GetItem(value, i))) return true;
  }
  return false;
}

// While keys get their content, no walk takes new ones: code that runs then and asks for a key gets a walk of its own.
class NoCurrentWalk {
 public:
  NoCurrentWalk() : hidden_(std::exchange(current_walk, nullptr)) {}
  ~NoCurrentWalk() { current_walk = hidden_; }
  NoCurrentWalk(const NoCurrentWalk&) = delete;
  NoCurrentWalk& operator=(const NoCurrentWalk&) = delete;

 private:
  Walk* const hidden_;
};

}  // namespace

bool is_exact_scalar(PyObject* object) {
  const PyTypeObject* type = Py_TYPE(object);
  return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBool_Type || type == &PyFloat_Type ||
         type == &PyBytes_Type || object == Py_None;
}

// Scalars are their own keys, so a tuple of scalars is returned itself. The tuple of others is made last: Python code
// that runs meanwhile could find an unfinished one.
Ref Walk::hash_items(Ref items) {
  const Py_ssize_t size = PyTuple_Size(items.get());
  std::vector<Ref> changed;  // once there is an item that is not its own key
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyTuple_GetItem(items.get(), i);  // borrowed
    if (is_exact_scalar(item)) {
      if (!changed.empty()) changed.push_back(Ref::borrow(item));
      continue;
    }
    Ref value = Ref::steal(hash_value(item));
    if (!value || is_sentinel(value.get())) return value;
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

PyObject* Walk::hash_sequence(PyObject* object) {
  // A list is copied first: what runs while its items are walked may change it.
  Ref items = Py_TYPE(object) == &PyList_Type ? Ref::steal(PyList_AsTuple(object)) : Ref::borrow(object);
  if (!items || Py_EnterRecursiveCall(" while keying a nested sequence") != 0) return nullptr;
  Ref hashed = hash_items(std::move(items));
  Py_LeaveRecursiveCall();
  if (!hashed || is_sentinel(hashed.get())) return hashed.release();
  return PyTuple_Pack(2, builder->seq_tag, hashed.get());
}

PyObject* Walk::hash_tensor(PyObject* object) {
  TensorView view;
  if (!view_tensor(object, builder->max_bytes, view, reason)) return nullptr;
  if (reason == Reason::kNone) return pending.add(object, view, argument);
  return new_reference(builder->not_hashable);
}

PyObject* Walk::hash_other(PyObject* object) {
  const size_t before = pending.size();
  PyObject* value = PyObject_CallFunctionObjArgs(builder->hashable, object, nullptr);
  if (value == nullptr) return nullptr;
  const bool is_container = PyList_Check(object) || PyTuple_Check(object) || PyDict_Check(object);
  if (pending.size() > before && !is_container && holds_tensor_key(value)) {
    // Upstream unpacks a numpy array of one object: a tensor in there is as little a key as the array is.
    Py_DECREF(value);
    value = new_reference(builder->not_hashable);
  }
  // A nested value that was refused has set its own reason: upstream came back here for it.
  if (is_sentinel(value) && reason == Reason::kNone) reason = refusal_of(object);
  return value;
}

PyObject* Walk::hash_value(PyObject* object) {
  if (is_exact_tensor(object)) return hash_tensor(object);
  if (builder->tensors_only) return hash_other(object);
  if (is_exact_scalar(object)) return new_reference(object);
  const PyTypeObject* type = Py_TYPE(object);
  if (type == &PyList_Type || type == &PyTuple_Type) return hash_sequence(object);
  return hash_other(object);
}

bool Walk::look_at_deferred() {
  PyObject* const current = argument;
  if (!pending.look(builder->max_bytes, reason)) return false;
  argument = reason == Reason::kNone ? current : pending.refused()->argument;
  return true;
}

bool Walk::fill() {
  const NoCurrentWalk no_current_walk;
  if (!pending.fill(builder->max_bytes, builder->to_host, reason)) return false;
  argument = pending.refused() != nullptr ? pending.refused()->argument : nullptr;
  return true;
}

Walk::Walk(BuilderObject* owner) : builder(owner), pending(owner->era), outer_(current_walk) { current_walk = this; }

Walk::~Walk() { current_walk = outer_; }

Walk* Walk::current(BuilderObject* builder) {
  return current_walk != nullptr && current_walk->builder == builder ? current_walk : nullptr;
}

}  // namespace otk::py
