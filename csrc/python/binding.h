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
  // None for a signature that is not ordinary: more than kMaxParameters, positional-only ones, a default that is not
  // constant, or not made of inspect's own types. Otherwise a capsule: Python counts who still uses the plan. Null with
  // an error if the signature cannot be read.
  static Ref compile(BuilderObject* builder, PyObject* signature);

  // The plan in what compile() returned, alive as long as that is; null for None.
  static const BindingPlan* from(const Ref& compiled);

  // Whether every name is exactly a str, as in a call; upstream's own function knows what to do with others.
  static bool has_plain_names(PyObject* kwargs);

  // The key, or None where the call bypasses the cache, or null with an error. args is a tuple, kwargs a dict.
  PyObject* build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const;

  static constexpr size_t kMaxParameters = 64;

 private:
  struct Parameter {
    Ref name;
    Ref default_value;  // null: none
    Ref default_item;   // the default's finished (name, value); null: none
    bool keyword;       // can be given by name
    bool precomputed;   // not None: the caller brings embeddings, and the call bypasses
  };
  class Slots;

  bool bind(PyObject* args, PyObject* kwargs, Slots& bound) const;
  const Parameter* precomputed_argument(const Slots& bound) const;
  // Whether there is a parameter that can be given by this name, and where.
  bool find(PyObject* name, size_t& index) const;
  bool add_parameter(BuilderObject* builder, PyObject* parameter);
  bool sort_by_name();

  Ref no_name_;  // "": no one argument is to blame
  std::vector<Parameter> parameters_;
  std::vector<size_t> by_name_;
  size_t positional_count_ = 0;
  std::optional<size_t> var_positional_;  // *args
  std::optional<size_t> var_keyword_;     // **kwargs
};

// The plans of a builder, by signature.
class BindingPlans {
 public:
  // What BindingPlan::compile() returned for the signature, now or earlier.
  Ref find(BuilderObject* builder, PyObject* signature);

 private:
  struct Entry {
    Ref signature;  // alive, so that no other object can have its address
    Ref plan;
  };

  bool is_left_to_upstream(const PyObject* signature);

  std::vector<Entry> entries_;
  // Of signatures without a plan only the addresses: a default that is not constant may lead to a pipeline, which would
  // live as long as the builder. Another signature that comes to be at the address is left to upstream as well until it
  // is looked at again: slower, with the same keys, and without the name of the argument that makes a call bypass.
  struct Left {
    const PyObject* signature;
    size_t recalls;  // for how many calls this is still believed
  };
  std::vector<Left> left_to_upstream_;
};

}  // namespace otk::py
