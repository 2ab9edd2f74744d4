// Upstream's argument binding, compiled once per signature.
#pragma once

#include <memory>
#include <vector>

#include "python.h"
#include "walk.h"

namespace otk::py {

// How the arguments of one signature become the items of a key: inspect.Signature.bind_partial(), apply_defaults(), the
// check for precomputed embeddings and the walk in name order, as upstream's _build_key does them.
class BindingPlan {
 public:
  // Null without an error for a signature that is not ordinary: one with *args or **kwargs, more than kMaxParameters,
  // or not made of inspect's own types. Null with an error if the signature cannot be read.
  static std::shared_ptr<BindingPlan> compile(BuilderObject* builder, PyObject* signature);

  // The key, or None where the call bypasses the cache, or null with an error. args is a tuple, kwargs a dict.
  PyObject* build(Walk& walk, PyObject* model_tag, PyObject* args, PyObject* kwargs) const;

  static constexpr size_t kMaxParameters = 64;

 private:
  struct Parameter {
    Ref name;
    Ref default_value;  // null: none
    Ref default_item;   // the finished (name, value) of a default that never changes, or null
    bool positional;
    bool keyword;
    bool precomputed;  // not None: the caller brings embeddings, and the call bypasses
  };
  struct Arguments;

  bool bind(PyObject* args, PyObject* kwargs, Arguments& bound) const;
  const Parameter* precomputed_argument(const Arguments& bound) const;
  bool find(PyObject* name, size_t& index) const;
  bool add_parameter(BuilderObject* builder, PyObject* parameter);
  bool sort_by_name();
  Ref make_item(Walk& walk, size_t index, PyObject* value) const;

  Ref no_name_;  // "": no one argument is to blame
  std::vector<Parameter> parameters_;
  std::vector<size_t> by_name_;
  size_t positional_count_ = 0;
};

// The plans of a builder, by signature. An entry without a plan stands for a signature that is not ordinary.
class BindingPlans {
 public:
  // False with an error set.
  bool find(BuilderObject* builder, PyObject* signature, std::shared_ptr<BindingPlan>& plan);

 private:
  struct Entry {
    Ref signature;  // alive, so that no other object can have its address
    std::shared_ptr<BindingPlan> plan;
  };
  std::vector<Entry> entries_;
};

}  // namespace otk::py
