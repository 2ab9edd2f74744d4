#include "binding.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace otk::py {
namespace {

// Signatures are few: one per pipeline. Past this many, something makes new ones all the time.
constexpr size_t kMaxPlans = 64;

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

PlanRef::PlanRef(BindingPlan* plan) : plan_(plan) {
  if (plan_ != nullptr) ++plan_->references_;
}

PlanRef::~PlanRef() {
  if (plan_ != nullptr && --plan_->references_ == 0) delete plan_;
}

PlanRef BindingPlan::make(BuilderObject* builder, PyObject* signature) {
  const Ref found = Ref::steal(
      PyObject_CallFunctionObjArgs(builder->plan, signature, builder->hashable, builder->precomputed, nullptr));
  if (!found || found.get() == Py_None) return nullptr;
  BindingPlan* const plan = new BindingPlan;
  const PlanRef owner(plan);
  PyObject* parameters;
  Py_ssize_t positional;
  if (PyArg_ParseTuple(found.get(), "nnnO!", &positional, &plan->var_positional_, &plan->var_keyword_, &PyTuple_Type,
                       &parameters) == 0) {
    return nullptr;
  }
  plan->positional_count_ = static_cast<size_t>(positional);
  if (PyTuple_Size(parameters) > static_cast<Py_ssize_t>(kMaxParameters)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(parameters); ++i) {
    PyObject *name, *value, *item;
    int keyword, precomputed;
    if (PyArg_ParseTuple(PyTuple_GetItem(parameters, i), "UppOO", &name, &keyword, &precomputed, &value, &item) == 0) {
      return nullptr;
    }
    plan->parameters_.push_back({Ref::borrow(name), Ref::borrow(value), Ref::borrow(item == Py_None ? nullptr : item),
                                 keyword != 0, precomputed != 0});
  }
  plan->by_name_.resize(plan->parameters_.size());
  std::iota(plan->by_name_.begin(), plan->by_name_.end(), size_t{0});
  std::sort(plan->by_name_.begin(), plan->by_name_.end(), [plan](size_t a, size_t b) {
    return PyUnicode_Compare(plan->parameters_[a].name.get(), plan->parameters_[b].name.get()) < 0;
  });
  return owner;
}

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

bool BindingPlan::can_bind(PyObject* args, PyObject* kwargs) {
  if (Py_TYPE(args) != &PyTuple_Type || Py_TYPE(kwargs) != &PyDict_Type) return false;
  Py_ssize_t position = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value) != 0) {
    if (Py_TYPE(name) != &PyUnicode_Type) return false;
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
    if (var_positional_ < 0) return false;
    PyObject* more = PyTuple_GetSlice(args, static_cast<Py_ssize_t>(taken), static_cast<Py_ssize_t>(given));
    if (more == nullptr) return false;
    bound[var_positional_] = more;
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
    if (var_keyword_ < 0) return false;
    PyObject*& more = bound[var_keyword_];
    if (more == nullptr) more = PyDict_New();
    if (more == nullptr || PyDict_SetItem(more, name, value) < 0) return false;
  }
  return true;
}

const BindingPlan::Parameter* BindingPlan::precomputed_argument(const Slots& bound) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].precomputed) continue;
    const bool has_default = static_cast<bool>(parameters_[i].default_item);
    PyObject* value = bound[i] == nullptr && has_default ? parameters_[i].default_value.get() : bound[i];
    if (value != nullptr && value != Py_None) return &parameters_[i];
  }
  return nullptr;
}

PyObject* BindingPlan::build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const {
  Slots bound(parameters_.size());
  if (!bind(args, kwargs, bound)) return PyErr_Occurred() == nullptr ? walk.bypass(model_tag, "binding") : nullptr;
  if (const Parameter* given = precomputed_argument(bound)) {
    walk.argument = given->name.get();
    return walk.bypass(model_tag, "precomputed");
  }
  // Not yet a tuple: Python code that runs meanwhile could find an unfinished one.
  Slots items(parameters_.size());
  PyObject* unread[kMaxParameters];  // the argument's name, where the item is a value with tensors in it
  Py_ssize_t count = 0;
  for (const size_t index : by_name_) {
    const Parameter& parameter = parameters_[index];
    PyObject* value = bound[index];
    unread[count] = nullptr;
    if (value == nullptr) {
      if (!parameter.default_item) continue;  // bind_partial() leaves it out
      items[count++] = new_reference(parameter.default_item.get());
      continue;
    }
    walk.argument = parameter.name.get();
    const size_t before = walk.tensors.size();
    Ref hashed = Ref::steal(walk.hash_value(value));
    if (!hashed) return nullptr;
    if (walk.is_sentinel(hashed.get())) return walk.bypass(model_tag);
    if (walk.tensors.size() > before) {
      unread[count] = walk.argument;
      items[count++] = hashed.release();
      continue;
    }
    items[count] = PyTuple_Pack(2, walk.argument, hashed.get());
    if (items[count++] == nullptr) return nullptr;
  }
  if (!walk.read()) return nullptr;
  if (walk.is_refused()) return walk.bypass(model_tag);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (unread[i] == nullptr) continue;
    const Ref value = walk.replace_tensors(items[i]);
    PyObject* item = value ? PyTuple_Pack(2, unread[i], value.get()) : nullptr;
    if (item == nullptr) return nullptr;
    Py_DECREF(std::exchange(items[i], item));
  }
  const Ref tuple = Ref::steal(PyTuple_New(count));
  if (!tuple) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SetItem(tuple.get(), i, std::exchange(items[i], nullptr));
  if (walk.state) return PyTuple_Pack(3, model_tag, tuple.get(), walk.state.get());
  return PyTuple_Pack(2, model_tag, tuple.get());
}

PlanRef BindingPlans::find(BuilderObject* builder, PyObject* signature) {
  for (const Entry& entry : entries_) {
    if (entry.signature.get() == signature) return entry.plan;
  }
  PlanRef plan = BindingPlan::make(builder, signature);
  if (!plan) return plan;
  std::vector<Entry> dropped;  // freed after the vector is whole again: a destructor may run Python code
  if (entries_.size() >= kMaxPlans) dropped.swap(entries_);
  entries_.push_back({Ref::borrow(signature), plan});
  return plan;
}

}  // namespace otk::py
