#include "binding.h"

#include <algorithm>
#include <memory>

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

// Signatures are few: one per pipeline. Past this many, something makes new ones all the time.
constexpr size_t kMaxPlans = 64;

// After so many calls it no longer counts what they cost to look at a signature again.
constexpr size_t kRecallsBeforeAnotherLook = 64;

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

// The item of the argument that is walked.
Ref make_item(Walk& walk, PyObject* value) {
  walk.reason = Reason::kNone;
  PyObject* name = walk.argument;
  Ref hashed = Ref::steal(walk.hash_value(value));
  if (!hashed || walk.is_sentinel(hashed.get())) return hashed;
  return Ref::steal(PyTuple_Pack(2, name, hashed.get()));
}

}  // namespace

// Owned references, one for each parameter, or null. Only as many slots are touched as there are parameters.
class BindingPlan::Slots {
 public:
  explicit Slots(size_t size) : size_(size) { std::fill_n(objects_, size, nullptr); }
  ~Slots() {
    for (size_t i = 0; i < size_; ++i) Py_XDECREF(objects_[i]);
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  PyObject*& operator[](size_t i) { return objects_[i]; }
  PyObject* operator[](size_t i) const { return objects_[i]; }

 private:
  PyObject* objects_[kMaxParameters];
  const size_t size_;
};

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
  if (kind != kPositionalOnly && kind != kPositionalOrKeyword && kind != kKeywordOnly) return false;
  const int precomputed = PySequence_Contains(builder->precomputed, name.get());
  if (precomputed < 0) return false;

  Parameter added{};
  if (default_value) {
    if (!is_constant(default_value.get())) return false;
    const Ref value = is_exact_scalar(default_value.get())
                          ? Ref::borrow(default_value.get())
                          : Ref::steal(PyObject_CallFunctionObjArgs(builder->hashable, default_value.get(), nullptr));
    if (!value || value.get() == builder->not_hashable) return false;
    added.default_item = Ref::steal(PyTuple_Pack(2, name.get(), value.get()));
    if (!added.default_item) return false;
    added.default_value = std::move(default_value);
  }
  added.name = std::move(name);
  added.positional = kind != kKeywordOnly;
  added.keyword = kind != kPositionalOnly;
  added.precomputed = precomputed == 1;
  // inspect puts the positional parameters first.
  if (added.positional) positional_count_ = parameters_.size() + 1;
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

bool BindingPlan::find(PyObject* name, size_t& index) const {
  // Argument names are interned nearly always, so identity finds them.
  for (index = 0; index < parameters_.size(); ++index) {
    if (parameters_[index].name.get() == name) return true;
  }
  for (index = 0; index < parameters_.size(); ++index) {
    if (PyUnicode_Compare(parameters_[index].name.get(), name) == 0) return true;
  }
  return false;
}

bool BindingPlan::has_plain_names(PyObject* kwargs) {
  Py_ssize_t position = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value) != 0) {
    if (Py_TYPE(name) != &PyUnicode_Type) return false;
  }
  return true;
}

// False without an error where Python would raise TypeError.
bool BindingPlan::bind(PyObject* args, PyObject* kwargs, Slots& bound) const {
  const auto given = static_cast<size_t>(PyTuple_Size(args));
  if (given > positional_count_) return false;
  for (size_t i = 0; i < given; ++i) {
    bound[i] = new_reference(PyTuple_GetItem(args, static_cast<Py_ssize_t>(i)));
  }
  Py_ssize_t position = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value) != 0) {
    size_t index;
    if (!find(name, index)) return false;
    if (!parameters_[index].keyword || bound[index] != nullptr) return false;
    bound[index] = new_reference(value);
  }
  return true;
}

const BindingPlan::Parameter* BindingPlan::precomputed_argument(const Slots& bound) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].precomputed) continue;
    PyObject* value = bound[i] != nullptr ? bound[i] : parameters_[i].default_value.get();
    if (value != nullptr && value != Py_None) return &parameters_[i];
  }
  return nullptr;
}

PyObject* BindingPlan::build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const {
  Slots bound(parameters_.size());
  if (!bind(args, kwargs, bound)) return bypass(walk.builder, model_tag, no_name_.get(), "binding");
  if (const Parameter* given = precomputed_argument(bound)) {
    return bypass(walk.builder, model_tag, given->name.get(), "precomputed");
  }
  // Not yet a tuple: Python code that runs meanwhile could find an unfinished one.
  Slots items(parameters_.size());
  size_t waiting[kMaxParameters];  // for an item whose tensor is not read yet: which of the pending ones it is
  Py_ssize_t count = 0;
  for (const size_t index : by_name_) {
    const Parameter& parameter = parameters_[index];
    PyObject* value = bound[index] != nullptr ? bound[index] : parameter.default_value.get();
    if (value == nullptr) continue;  // not given: bind_partial() leaves it out
    walk.argument = parameter.name.get();
    if (is_exact_tensor(value)) {
      waiting[count++] = walk.defer(value);
      continue;
    }
    const bool is_ready = bound[index] == nullptr;
    if (!is_ready && !is_exact_scalar(value)) {
      if (!walk.look_at_deferred()) return nullptr;
      if (walk.reason != Reason::kNone) return bypass(walk.builder, model_tag, walk.argument, reason_name(walk.reason));
    }
    Ref item = is_ready ? Ref::borrow(parameter.default_item.get()) : make_item(walk, value);
    if (!item) return nullptr;
    if (walk.is_sentinel(item.get())) {
      return bypass(walk.builder, model_tag, parameter.name.get(), reason_name(walk.reason));
    }
    items[count++] = item.release();
  }
  if (!walk.fill()) return nullptr;
  if (walk.reason != Reason::kNone) {
    PyObject* name = walk.argument != nullptr ? walk.argument : no_name_.get();
    return bypass(walk.builder, model_tag, name, reason_name(walk.reason));
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (items[i] != nullptr) continue;
    const PendingKey& read = walk.pending.at(waiting[i]);
    items[i] = PyTuple_Pack(2, read.argument, read.key.get());
    if (items[i] == nullptr) return nullptr;
  }
  const Ref tuple = Ref::steal(PyTuple_New(count));
  if (!tuple) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SetItem(tuple.get(), i, std::exchange(items[i], nullptr));
  return PyTuple_Pack(2, model_tag, tuple.get());
}

Ref BindingPlans::find(BuilderObject* builder, PyObject* signature) {
  for (const Entry& entry : entries_) {
    if (entry.signature.get() == signature) return Ref::borrow(entry.plan.get());
  }
  if (is_left_to_upstream(signature)) return Ref::borrow(Py_None);
  Ref plan = BindingPlan::compile(builder, signature);
  if (!plan) return plan;
  if (plan.get() == Py_None) {
    left_to_upstream_.push_back(signature);
    return plan;
  }
  std::vector<Entry> dropped;  // freed after the vector is whole again: a destructor may run Python code
  if (entries_.size() >= kMaxPlans) dropped.swap(entries_);
  entries_.push_back({Ref::borrow(signature), Ref::borrow(plan.get())});
  return plan;
}

bool BindingPlans::is_left_to_upstream(const PyObject* signature) {
  const auto found = std::find(left_to_upstream_.begin(), left_to_upstream_.end(), signature);
  if (found == left_to_upstream_.end()) {
    if (left_to_upstream_.size() >= kMaxPlans) left_to_upstream_.clear();
    return false;
  }
  if (++recalled_ % kRecallsBeforeAnotherLook != 0) return true;
  left_to_upstream_.erase(found);
  return false;
}

}  // namespace otk::py
