// Binding plans out of inspect.Signature objects.
#include <algorithm>
#include <memory>
#include <numeric>

#include "binding.h"
#include "torch_tensor.h"

namespace otk::py {
namespace {

// inspect's parameter kinds, by value; 0 is positional-only.
enum Kind : long { kPositionalOrKeyword = 1, kVarPositional = 2, kKeywordOnly = 3, kVarKeyword = 4 };

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

std::shared_ptr<const BindingPlan> BindingPlan::compile(BuilderObject* builder, PyObject* signature) {
  if (!find_inspect() || Py_TYPE(signature) != inspect.signature) return nullptr;
  const Ref mapping = Ref::steal(PyObject_GetAttr(signature, inspect.parameters));
  const Ref values = mapping ? Ref::steal(PyMapping_Values(mapping.get())) : Ref();
  const Py_ssize_t size = values ? PyList_Size(values.get()) : -1;
  if (size < 0 || static_cast<size_t>(size) > kMaxParameters) return nullptr;
  auto plan = std::make_shared<BindingPlan>();
  plan->parameters_.reserve(static_cast<size_t>(size));
  long last_kind = kPositionalOrKeyword;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!plan->add_parameter(builder, PyList_GetItem(values.get(), i), last_kind)) return nullptr;
  }
  plan->sort_by_name();
  return plan;
}

// False for a parameter that is not ordinary, and with an error set where there is no memory.
bool BindingPlan::add_parameter(BuilderObject* builder, PyObject* parameter, long& last_kind) {
  if (Py_TYPE(parameter) != inspect.parameter) return false;
  Parameter added{};
  added.name = Ref::steal(PyObject_GetAttr(parameter, inspect.name));
  Ref value = Ref::steal(PyObject_GetAttr(parameter, inspect.default_value));
  const Ref kind_value = Ref::steal(PyObject_GetAttr(parameter, inspect.kind));
  if (!added.name || !value || !kind_value || Py_TYPE(added.name.get()) != &PyUnicode_Type) return false;
  const long kind = PyLong_AsLong(kind_value.get());
  if (PyErr_Occurred() != nullptr) PyErr_Clear();  // not one of inspect's kinds
  // inspect sees to the order, unless it is told not to.
  const bool is_variadic = kind == kVarPositional || kind == kVarKeyword;
  if (kind < last_kind || (is_variadic && kind == last_kind) || kind > kVarKeyword) return false;
  last_kind = kind;
  // Where it is not given, apply_defaults() has an empty tuple or dict. Nobody else gets to see these.
  if (kind == kVarPositional) value = Ref::steal(PyTuple_New(0));
  if (kind == kVarKeyword) value = Ref::steal(PyDict_New());
  if (!value) return false;
  if (value.get() != inspect.empty) {
    if (!is_variadic && !is_constant(value.get())) return false;
    const Ref hashed = Ref::steal(PyObject_CallFunctionObjArgs(builder->hashable, value.get(), nullptr));
    if (!hashed || hashed.get() == builder->not_hashable) return false;
    added.default_item = Ref::steal(PyTuple_Pack(2, added.name.get(), hashed.get()));
    if (!added.default_item) return false;
    added.default_value = std::move(value);
  }
  const int precomputed = PySequence_Contains(builder->precomputed, added.name.get());
  if (precomputed < 0) return false;
  added.precomputed = precomputed == 1;
  added.keyword = kind == kPositionalOrKeyword || kind == kKeywordOnly;
  if (kind == kPositionalOrKeyword) positional_count_ = parameters_.size() + 1;
  if (kind == kVarPositional) var_positional_ = parameters_.size();
  if (kind == kVarKeyword) var_keyword_ = parameters_.size();
  parameters_.push_back(std::move(added));
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
