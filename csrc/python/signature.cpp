// Binding plans out of inspect.Signature objects.
#include <algorithm>
#include <memory>
#include <numeric>

#include "binding.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// inspect's parameter kinds, by value.
enum Kind : long {
  kPositionalOnly = 0,
  kPositionalOrKeyword = 1,
  kVarPositional = 2,
  kKeywordOnly = 3,
  kVarKeyword = 4
};

constexpr char kCapsuleName[] = "omni_tensor_key.binding_plan";

// Found once, kept for the life of the process. Guarded by the GIL.
struct Inspect {
  PyTypeObject* signature = nullptr;
  PyTypeObject* parameter = nullptr;
  PyObject* empty = nullptr;  // the default of a parameter without one
  // Names of attributes.
  PyObject* parameters = nullptr;
  PyObject* name = nullptr;
  PyObject* kind = nullptr;
  PyObject* default_value = nullptr;
} inspect;

// False with an error set.
bool find_inspect() {
  if (inspect.signature != nullptr) return true;
  const Ref module = Ref::steal(PyImport_ImportModule("inspect"));
  if (!module) return false;
  Ref signature = Ref::steal(PyObject_GetAttrString(module.get(), "Signature"));
  Ref parameter = Ref::steal(PyObject_GetAttrString(module.get(), "Parameter"));
  Ref empty = parameter ? Ref::steal(PyObject_GetAttrString(parameter.get(), "empty")) : Ref();
  Ref parameters = Ref::steal(PyUnicode_InternFromString("parameters"));
  Ref name = Ref::steal(PyUnicode_InternFromString("name"));
  Ref kind = Ref::steal(PyUnicode_InternFromString("kind"));
  Ref default_value = Ref::steal(PyUnicode_InternFromString("default"));
  if (!signature || !empty || !parameters || !name || !kind || !default_value) return false;
  inspect.empty = empty.release();
  inspect.parameters = parameters.release();
  inspect.name = name.release();
  inspect.kind = kind.release();
  inspect.default_value = default_value.release();
  inspect.parameter = reinterpret_cast<PyTypeObject*>(parameter.release());
  inspect.signature = reinterpret_cast<PyTypeObject*>(signature.release());
  return true;
}

// How many values a default may consist of to be looked through: it may refer to one tuple many times over.
constexpr int kMaxValues = 64;

// Whether neither the object nor what it refers to can change. It does not lead to a pipeline either.
bool is_constant(PyObject* object, int& values_left) {
  if (--values_left < 0) return false;
  if (is_exact_scalar(object) || is_torch_constant(object)) return true;
  if (Py_TYPE(object) != &PyTuple_Type) return false;
  const Py_ssize_t size = PyTuple_Size(object);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_constant(PyTuple_GetItem(object, i), values_left)) return false;
  }
  return true;
}

bool is_constant(PyObject* object) {
  int values_left = kMaxValues;
  return is_constant(object, values_left);
}

}  // namespace

Ref BindingPlan::compile(BuilderObject* builder, PyObject* signature) {
  const auto not_ordinary = [] { return PyErr_Occurred() == nullptr ? Ref::borrow(Py_None) : Ref(); };
  if (!find_inspect() || Py_TYPE(signature) != inspect.signature) return not_ordinary();
  const Ref mapping = Ref::steal(PyObject_GetAttr(signature, inspect.parameters));
  const Ref values = mapping ? Ref::steal(PyMapping_Values(mapping.get())) : Ref();
  const Py_ssize_t size = values ? PyList_Size(values.get()) : -1;
  if (size < 0 || static_cast<size_t>(size) > kMaxParameters) return not_ordinary();
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (Py_TYPE(PyList_GetItem(values.get(), i)) != inspect.parameter) return not_ordinary();
  }
  auto plan = std::make_unique<BindingPlan>();
  plan->no_name_ = Ref::steal(PyUnicode_InternFromString(""));
  if (!plan->no_name_) return Ref();
  plan->parameters_.reserve(static_cast<size_t>(size));
  long last_kind = kPositionalOnly;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!plan->add_parameter(builder, PyList_GetItem(values.get(), i), last_kind)) return not_ordinary();
  }
  if (plan->may_be_kept_ && !plan->hash_defaults(builder)) return not_ordinary();
  plan->sort_by_name();
  const auto free_plan = [](PyObject* capsule) {
    delete static_cast<BindingPlan*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  };
  Ref capsule = Ref::steal(PyCapsule_New(plan.get(), kCapsuleName, free_plan));
  if (capsule) plan.release();
  return capsule;
}

const BindingPlan* BindingPlan::from(const Ref& compiled) {
  if (compiled.get() == Py_None) return nullptr;
  return static_cast<const BindingPlan*>(PyCapsule_GetPointer(compiled.get(), kCapsuleName));
}

bool BindingPlan::add_parameter(BuilderObject* builder, PyObject* parameter, long& last_kind) {
  Ref name = Ref::steal(PyObject_GetAttr(parameter, inspect.name));
  Ref default_value = Ref::steal(PyObject_GetAttr(parameter, inspect.default_value));
  const Ref kind_value = Ref::steal(PyObject_GetAttr(parameter, inspect.kind));
  if (!name || !default_value || !kind_value || Py_TYPE(name.get()) != &PyUnicode_Type) return false;
  const long kind = PyLong_AsLong(kind_value.get());
  if (PyErr_Occurred() != nullptr) PyErr_Clear();  // not one of inspect's kinds
  // inspect sees to the order, unless it is told not to.
  const bool is_variadic = kind == kVarPositional || kind == kVarKeyword;
  if (kind < last_kind || (is_variadic && kind == last_kind) || kind > kVarKeyword) return false;
  last_kind = kind;
  if (default_value.get() == inspect.empty) default_value = Ref();
  // Where it is not given, apply_defaults() has an empty tuple or dict. Nobody else gets to see these.
  if (kind == kVarPositional) default_value = Ref::steal(PyTuple_New(0));
  if (kind == kVarKeyword) default_value = Ref::steal(PyDict_New());
  if (PyErr_Occurred() != nullptr) return false;
  const int precomputed = PySequence_Contains(builder->precomputed, name.get());
  if (precomputed < 0) return false;

  if (default_value && !is_variadic) may_be_kept_ = may_be_kept_ && is_constant(default_value.get());
  if (kind == kPositionalOnly || kind == kPositionalOrKeyword) positional_count_ = parameters_.size() + 1;
  if (kind == kPositionalOnly) positional_only_count_ = parameters_.size() + 1;
  if (kind == kVarPositional) var_positional_ = parameters_.size();
  if (kind == kVarKeyword) var_keyword_ = parameters_.size();
  Parameter added{};
  added.name = std::move(name);
  added.default_value = std::move(default_value);
  added.keyword = kind == kPositionalOrKeyword || kind == kKeywordOnly;
  added.precomputed = precomputed == 1;
  parameters_.push_back(std::move(added));
  return true;
}

bool BindingPlan::hash_defaults(BuilderObject* builder) {
  for (Parameter& parameter : parameters_) {
    PyObject* value = parameter.default_value.get();
    if (value == nullptr) continue;
    const Ref hashed = is_exact_scalar(value)
                           ? Ref::borrow(value)
                           : Ref::steal(PyObject_CallFunctionObjArgs(builder->hashable, value, nullptr));
    if (!hashed || hashed.get() == builder->not_hashable) return false;
    parameter.default_item = Ref::steal(PyTuple_Pack(2, parameter.name.get(), hashed.get()));
    if (!parameter.default_item) return false;
  }
  return true;
}

void BindingPlan::sort_by_name() {
  by_name_.resize(parameters_.size());
  std::iota(by_name_.begin(), by_name_.end(), size_t{0});
  std::sort(by_name_.begin(), by_name_.end(), [this](size_t a, size_t b) {
    return PyUnicode_Compare(parameters_[a].name.get(), parameters_[b].name.get()) < 0;
  });
}

}  // namespace otk::py
