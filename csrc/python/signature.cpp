// Binding plans out of inspect.Signature objects.
#include <algorithm>
#include <memory>

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

// Tuples in tuples, as deep as a default may have them.
constexpr int kMaxDepth = 8;

// Whether neither the object nor what it refers to can change. It does not lead to a pipeline either.
bool is_constant(PyObject* object, int depth = kMaxDepth) {
  if (is_exact_scalar(object) || is_torch_constant(object)) return true;
  if (Py_TYPE(object) != &PyTuple_Type || depth == 0) return false;
  const Py_ssize_t size = PyTuple_Size(object);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_constant(PyTuple_GetItem(object, i), depth - 1)) return false;
  }
  return true;
}

// The default of an inspect.Parameter; null without an error where it has none.
Ref default_of(PyObject* parameter) {
  Ref value = Ref::steal(PyObject_GetAttrString(parameter, "default"));
  const Ref empty = Ref::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(parameter)), "empty"));
  if (!value || !empty || value.get() == empty.get()) return Ref();
  return value;
}

// Whether the type of `object` is exactly inspect.<name>.
bool is_inspect_type(PyObject* object, const char* name) {
  const Ref inspect = Ref::steal(PyImport_ImportModule("inspect"));
  const Ref type = inspect ? Ref::steal(PyObject_GetAttrString(inspect.get(), name)) : Ref();
  return type && reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.get();
}

}  // namespace

Ref BindingPlan::compile(BuilderObject* builder, PyObject* signature) {
  const auto not_ordinary = [] { return PyErr_Occurred() == nullptr ? Ref::borrow(Py_None) : Ref(); };
  if (!is_inspect_type(signature, "Signature")) return not_ordinary();
  const Ref mapping = Ref::steal(PyObject_GetAttrString(signature, "parameters"));
  const Ref values = mapping ? Ref::steal(PyMapping_Values(mapping.get())) : Ref();
  if (!values) return Ref();
  const Py_ssize_t size = PyList_Size(values.get());
  if (size < 0 || static_cast<size_t>(size) > kMaxParameters) return not_ordinary();
  auto plan = std::make_unique<BindingPlan>();
  plan->no_name_ = Ref::steal(PyUnicode_InternFromString(""));
  if (!plan->no_name_) return Ref();
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!plan->add_parameter(builder, PyList_GetItem(values.get(), i))) return not_ordinary();
  }
  if (!plan->sort_by_name()) return Ref();
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

bool BindingPlan::add_parameter(BuilderObject* builder, PyObject* parameter) {
  if (!is_inspect_type(parameter, "Parameter")) return false;
  Ref name = Ref::steal(PyObject_GetAttrString(parameter, "name"));
  Ref default_value = default_of(parameter);
  const Ref kind_value = Ref::steal(PyObject_GetAttrString(parameter, "kind"));
  if (PyErr_Occurred() != nullptr || Py_TYPE(name.get()) != &PyUnicode_Type) return false;
  const long kind = PyLong_AsLong(kind_value.get());
  // Whether a positional-only parameter may be given by name, where it has a default, differs between Pythons.
  if (kind <= kPositionalOnly || kind > kVarKeyword) return false;
  // Where it is not given, apply_defaults() has an empty tuple or dict. Nobody else gets to see these.
  if (kind == kVarPositional) default_value = Ref::steal(PyTuple_New(0));
  if (kind == kVarKeyword) default_value = Ref::steal(PyDict_New());
  if (PyErr_Occurred() != nullptr) return false;
  const int precomputed = PySequence_Contains(builder->precomputed, name.get());
  if (precomputed < 0) return false;

  Parameter added{};
  if (default_value) {
    if (kind != kVarKeyword && !is_constant(default_value.get())) return false;
    const Ref value = is_exact_scalar(default_value.get())
                          ? Ref::borrow(default_value.get())
                          : Ref::steal(PyObject_CallFunctionObjArgs(builder->hashable, default_value.get(), nullptr));
    if (!value || value.get() == builder->not_hashable) return false;
    added.default_item = Ref::steal(PyTuple_Pack(2, name.get(), value.get()));
    if (!added.default_item) return false;
    added.default_value = std::move(default_value);
  }
  added.name = std::move(name);
  added.keyword = kind == kPositionalOrKeyword || kind == kKeywordOnly;
  added.precomputed = precomputed == 1;
  // inspect puts the positional parameters first.
  if (kind == kPositionalOrKeyword) positional_count_ = parameters_.size() + 1;
  if (kind == kVarPositional) var_positional_ = parameters_.size();
  if (kind == kVarKeyword) var_keyword_ = parameters_.size();
  parameters_.push_back(std::move(added));
  return true;
}

bool BindingPlan::sort_by_name() {
  by_name_.resize(parameters_.size());
  for (size_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
  bool failed = false;
  std::sort(by_name_.begin(), by_name_.end(), [this, &failed](size_t a, size_t b) {
    const int less = PyObject_RichCompareBool(parameters_[a].name.get(), parameters_[b].name.get(), Py_LT);
    failed |= less < 0;
    return less == 1;
  });
  return !failed;
}

}  // namespace otk::py
