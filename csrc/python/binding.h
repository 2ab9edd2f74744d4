// Upstream's argument binding, compiled once per signature.
#pragma once

#include <optional>
#include <vector>

#include "python.h"
#include "walk.h"

namespace otk::py {

// How the arguments of one signature become the items of a key: inspect.Signature.bind_partial(), apply_defaults(), the
// check for precomputed embeddings and the walk in name order, as upstream's _build_key does them.
class BindingPlan {
 public:
  // None for a signature that is not ordinary: more than kMaxParameters, not made of inspect's own types, or not in the
  // order that inspect wants. Otherwise a capsule: Python counts who still uses the plan. Null with an error if the
  // signature cannot be read.
  static Ref compile(BuilderObject* builder, PyObject* signature);

  // The plan in what compile() returned, alive as long as that is; null for None.
  static const BindingPlan* from(const Ref& compiled);

  // Whether all defaults are constants. Others may lead to a pipeline: who keeps the plan keeps that alive.
  bool may_be_kept() const { return may_be_kept_; }

  // Whether this is a call as Python makes them, a tuple and a dict of str, and gives no positional-only parameter by
  // name, which Pythons bind differently. Upstream's own function knows what to do with others.
  bool can_bind(PyObject* args, PyObject* kwargs) const;

  // The key of a call that it can bind, or None where the call bypasses the cache, or null with an error.
  PyObject* build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const;

  static constexpr size_t kMaxParameters = 64;

 private:
  struct Parameter {
    Ref name;
    Ref default_value;  // null: none
    Ref default_item;   // the default's finished (name, value), in a plan that may be kept; otherwise null
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
  bool hash_defaults(BuilderObject* builder);
  void sort_by_name();

  Ref no_name_;  // "": no one argument is to blame
  std::vector<Parameter> parameters_;
  std::vector<size_t> by_name_;
  bool may_be_kept_ = true;
  size_t positional_count_ = 0;
  size_t positional_only_count_ = 0;
  std::optional<size_t> var_positional_;  // *args
  std::optional<size_t> var_keyword_;     // **kwargs
};

// The plans of a builder, by signature. A plan that may not be kept is made anew at each call.
class BindingPlans {
 public:
  // What BindingPlan::compile() returns for the signature.
  Ref find(BuilderObject* builder, PyObject* signature);

  void clear();

 private:
  struct Entry {
    Ref signature;  // alive, so that no other object can have its address
    Ref plan;
  };
  std::vector<Entry> entries_;
};

}  // namespace otk::py
