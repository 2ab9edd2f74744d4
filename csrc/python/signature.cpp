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

// Containers in containers, as deep as a default may have them.
constexpr int kMaxDepth = 8;

// Whether the object is a scalar, a constant of torch's, or a tuple of such; with `may_change`, in lists and dicts too.
// It does not lead to a pipeline, or not yet: what a default is changed to lives as long as its function anyway.
bool is_plain(PyObject* object, bool may_change, int depth = kMaxDepth) {
  if (is_exact_scalar(object) || is_torch_constant(object)) return true;
  if (depth == 0) return false;
  const auto plain = [may_change, depth](PyObject* item) { return is_plain(item, may_change, depth - 1); };
  const PyTypeObject* type = Py_TYPE(object);
  if (type == &PyTuple_Type) {
    const Py_ssize_t size = PyTuple_Size(object);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!plain(PyTuple_GetItem(object, i))) return false;
    }
    return true;
  }
  if (type == &PyList_Type && may_change) {
    const Py_ssize_t size = PyList_Size(object);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!plain(PyList_GetItem(object, i))) return false;
    }
    return true;
  }
  if (type != &PyDict_Type || !may_change) return false;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  while (PyDict_Next(object, &position, &key, &value) != 0) {
    if (!plain(key) || !plain(value)) return false;
  }
  return true;
}

}  // namespace

Ref BindingPlan::compile(BuilderObject* builder, PyObject* signature) {
  const auto not_ordinary = [] { return PyErr_Occurred() == nullptr ? Ref::borrow(Py_None) : Ref(); };
  if (!find_inspect() || Py_TYPE(signature) != inspect.signature) return not_ordinary();
  const Ref mapping = Ref::steal(PyObject_GetAttr(signature, inspect.parameters));
  const Py_ssize_t size = mapping ? PyMapping_Size(mapping.get()) : -1;
  if (size < 0 || static_cast<size_t>(size) > kMaxParameters) return not_ordinary();
  const Ref values = Ref::steal(PyMapping_Values(mapping.get()));
  if (!values) return Ref();
  auto plan = std::make_unique<BindingPlan>();
  plan->no_name_ = Ref::steal(PyUnicode_InternFromString(""));
  if (!plan->no_name_) return Ref();
  plan->parameters_.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!plan->add_parameter(builder, PyList_GetItem(values.get(), i))) return not_ordinary();
  }
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

bool BindingPlan::add_parameter(BuilderObject* builder, PyObject* parameter) {
  if (Py_TYPE(parameter) != inspect.parameter) return false;
  Ref name = Ref::steal(PyObject_GetAttr(parameter, inspect.name));
  Ref default_value = Ref::steal(PyObject_GetAttr(parameter, inspect.default_value));
  const Ref kind_value = Ref::steal(PyObject_GetAttr(parameter, inspect.kind));
  if (!name || !default_value || !kind_value || Py_TYPE(name.get()) != &PyUnicode_Type) return false;
  const long kind = PyLong_AsLong(kind_value.get());
  if (kind < kPositionalOnly || kind > kVarKeyword) return false;
  if (default_value.get() == inspect.empty) default_value = Ref();
  // Where it is not given, apply_defaults() has an empty tuple or dict. Nobody else gets to see these.
  if (kind == kVarPositional) default_value = Ref::steal(PyTuple_New(0));
  if (kind == kVarKeyword) default_value = Ref::steal(PyDict_New());
  if (PyErr_Occurred() != nullptr) return false;
  const int precomputed = PySequence_Contains(builder->precomputed, name.get());
  if (precomputed < 0) return false;

  Parameter added{};
  if (default_value) {
    may_be_kept_ &= is_plain(default_value.get(), true);
    if (kind == kVarKeyword || is_plain(default_value.get(), false)) {
      const Ref value = is_exact_scalar(default_value.get())
                            ? Ref::borrow(default_value.get())
                            : Ref::steal(PyObject_CallFunctionObjArgs(builder->hashable, default_value.get(), nullptr));
      if (!value || value.get() == builder->not_hashable) return false;
      added.default_item = Ref::steal(PyTuple_Pack(2, name.get(), value.get()));
      if (!added.default_item) return false;
    }
    added.default_value = std::move(default_value);
  }
  added.name = std::move(name);
  added.keyword = kind == kPositionalOrKeyword || kind == kKeywordOnly;
  added.precomputed = precomputed == 1;
  // inspect puts the positional parameters first.
  if (kind == kPositionalOnly || kind == kPositionalOrKeyword) positional_count_ = parameters_.size() + 1;
  if (kind == kPositionalOnly) positional_only_count_ = parameters_.size() + 1;
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
