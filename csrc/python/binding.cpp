#include "binding.h"

#include <algorithm>

#include "torch_tensor.h"

namespace otk::py {
namespace {

// Signatures are few: one per pipeline. Past this many, something makes new ones all the time.
constexpr size_t kMaxPlans = 64;

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

bool BindingPlan::find(PyObject* name, size_t& index) const {
  // Argument names are interned nearly always, so identity finds them.
  for (index = 0; index < parameters_.size(); ++index) {
    if (parameters_[index].name.get() == name) return parameters_[index].keyword;
  }
  for (index = 0; index < parameters_.size(); ++index) {
    if (PyUnicode_Compare(parameters_[index].name.get(), name) == 0) return parameters_[index].keyword;
  }
  return false;
}

bool BindingPlan::can_bind(PyObject* args, PyObject* kwargs) const {
  if (Py_TYPE(args) != &PyTuple_Type || Py_TYPE(kwargs) != &PyDict_Type) return false;
  Py_ssize_t position = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value) != 0) {
    if (Py_TYPE(name) != &PyUnicode_Type) return false;
    for (size_t i = 0; i < positional_only_count_; ++i) {
      if (PyUnicode_Compare(parameters_[i].name.get(), name) == 0) return false;
    }
  }
  return true;
}

// False where Python would raise TypeError, and with an error set where there is no memory.
bool BindingPlan::bind(PyObject* args, PyObject* kwargs, Slots& bound) const {
  const auto given = static_cast<size_t>(PyTuple_Size(args));
  const size_t taken = std::min(given, positional_count_);
  for (size_t i = 0; i < taken; ++i) {
    bound[i] = new_reference(PyTuple_GetItem(args, static_cast<Py_ssize_t>(i)));
  }
  if (given > taken) {
    if (!var_positional_) return false;
    PyObject* more = PyTuple_GetSlice(args, static_cast<Py_ssize_t>(taken), static_cast<Py_ssize_t>(given));
    if (more == nullptr) return false;
    bound[*var_positional_] = more;
  }
  Py_ssize_t position = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value) != 0) {
    size_t index;
    if (find(name, index)) {
      if (bound[index] != nullptr) return false;
      bound[index] = new_reference(value);
      continue;
    }
    if (!var_keyword_) return false;
    PyObject*& more = bound[*var_keyword_];
    if (more == nullptr) more = PyDict_New();
    if (more == nullptr || PyDict_SetItem(more, name, value) < 0) return false;
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
  if (!bind(args, kwargs, bound)) {
    return PyErr_Occurred() == nullptr ? bypass(walk.builder, model_tag, no_name_.get(), "binding") : nullptr;
  }
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
    const bool is_ready = bound[index] == nullptr && parameter.default_item;
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
  Ref plan = BindingPlan::compile(builder, signature);
  if (!plan || plan.get() == Py_None || !BindingPlan::from(plan)->may_be_kept()) return plan;
  if (builder->era->is_over()) return plan;
  std::vector<Entry> dropped;  // freed after the vector is whole again: a destructor may run Python code
  if (entries_.size() >= kMaxPlans) dropped.swap(entries_);
  entries_.push_back({Ref::borrow(signature), Ref::borrow(plan.get())});
  return plan;
}

void BindingPlans::clear() {
  std::vector<Entry> dropped;  // as above
  dropped.swap(entries_);
}

}  // namespace otk::py
