// Upstream's argument binding, compiled once per signature.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "python.h"
#include "walk.h"

namespace otk::py {

// How the arguments of one signature become the items of a key: inspect.Signature.bind_partial(), apply_defaults(), the
// check for precomputed embeddings and the walk in name order, as upstream's _build_key does them.
class BindingPlan {
 public:
  // Null without an error for a signature that is not ordinary: one that is not made of inspect's own types, has
  // positional-only parameters, defaults that are not constants, or more than kMaxParameters parameters.
  static std::shared_ptr<const BindingPlan> compile(BuilderObject* builder, PyObject* signature);

  // Whether this is a call as Python makes them: a tuple and a dict of str. Upstream's own function binds others.
  static bool can_bind(PyObject* args, PyObject* kwargs);

  // The key of a call that it can bind, or None where the call bypasses the cache, or null with an error.
  PyObject* build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const;

  static constexpr size_t kMaxParameters = 64;

 private:
  struct Parameter {
    Ref name;
    Ref default_value;  // null: none
    Ref default_item;   // the default's finished (name, value)
    bool keyword;       // can be given by name
    bool precomputed;   // not None: the caller brings embeddings, and the call bypasses
  };
  class Slots;

  bool bind(PyObject* args, PyObject* kwargs, Slots& bound) const;
  const Parameter* precomputed_argument(const Slots& bound) const;
  // Whether there is a parameter that can be given by this name, and where.
  bool find(PyObject* name, size_t& index) const;
  // The kind of the parameter before, in inspect's numbers, becomes that of this one.
  bool add_parameter(BuilderObject* builder, PyObject* parameter, long& last_kind);
  void sort_by_name();

  std::vector<Parameter> parameters_;
  std::vector<size_t> by_name_;
  size_t positional_count_ = 0;
  std::optional<size_t> var_positional_;  // *args
  std::optional<size_t> var_keyword_;     // **kwargs
};

// The plans of a builder, by signature.
class BindingPlans {
 public:
  // As BindingPlan::compile(). Signatures that are not ordinary are not kept: their defaults may lead to a pipeline.
  std::shared_ptr<const BindingPlan> find(BuilderObject* builder, PyObject* signature);

 private:
  struct Entry {
    Ref signature;  // alive, so that no other object can have its address
    std::shared_ptr<const BindingPlan> plan;
  };
  std::vector<Entry> entries_;
};

}  // namespace otk::py
