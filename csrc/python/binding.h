// Upstream's argument binding, compiled once per signature.
#pragma once

#include <utility>
#include <vector>

#include "python.h"
#include "walk.h"

namespace otk::py {

class BindingPlan;

// A counted reference to a plan, or none; copied under the GIL. std::shared_ptr would count atomically, and link to a
// symbol of glibc 2.32 for it, which a manylinux_2_28 wheel must not need.
class PlanRef {
 public:
  PlanRef(BindingPlan* plan = nullptr);
  PlanRef(const PlanRef& other) : PlanRef(other.plan_) {}
  PlanRef(PlanRef&& other) noexcept : plan_(std::exchange(other.plan_, nullptr)) {}
  PlanRef& operator=(PlanRef other) noexcept {
    std::swap(plan_, other.plan_);
    return *this;
  }
  ~PlanRef();

  explicit operator bool() const { return plan_ != nullptr; }
  const BindingPlan* operator->() const { return plan_; }

 private:
  BindingPlan* plan_;
};

// How the arguments of one signature become the items of a key: inspect.Signature.bind_partial(), apply_defaults(), the
// check for precomputed embeddings and the walk in name order, as upstream's _build_key does them.
class BindingPlan {
 public:
  // From what the builder's plan function returns for a signature (omni_tensor_key/keys/signature.py). Null without an
  // error where that is None: the signature is not ordinary.
  static PlanRef make(BuilderObject* builder, PyObject* signature);

  // Whether this is a call as Python makes them: a tuple and a dict of str. Upstream's own function binds others.
  static bool can_bind(PyObject* args, PyObject* kwargs);

  // The key of a call that it can bind, or None where the call bypasses the cache, or null with an error.
  PyObject* build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const;

  static constexpr size_t kMaxParameters = 64;  // also in signature.py

 private:
  friend class PlanRef;
  struct Parameter {
    Ref name;
    Ref default_value;
    Ref default_item;  // the default's finished (name, value); null: there is no default
    bool keyword;      // can be given by name
    bool precomputed;  // not None: the caller brings embeddings, and the call bypasses
  };
  class Slots;

  bool bind(PyObject* args, PyObject* kwargs, Slots& bound) const;
  const Parameter* precomputed_argument(const Slots& bound) const;
  // Whether there is a parameter that can be given by this name, and where.
  bool find(PyObject* name, size_t& index) const;
  size_t references_ = 0;
  std::vector<Parameter> parameters_;
  std::vector<size_t> by_name_;
  size_t positional_count_ = 0;
  Py_ssize_t var_positional_ = -1;  // the index of *args; -1: there is none
  Py_ssize_t var_keyword_ = -1;     // of **kwargs
};

// The plans of a builder, by signature.
class BindingPlans {
 public:
  // As BindingPlan::make(). Signatures that are not ordinary are not kept: their defaults may lead to a pipeline.
  PlanRef find(BuilderObject* builder, PyObject* signature);

 private:
  struct Entry {
    Ref signature;  // alive, so that no other object can have its address
    PlanRef plan;
  };
  std::vector<Entry> entries_;
};

}  // namespace otk::py
