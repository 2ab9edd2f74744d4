// KeyBuilder: the object whose two methods stand in for upstream's _hashable and _build_key.
#pragma once

#include <stdint.h>

#include "python.h"

namespace otk::py {

class BindingPlans;

struct BuilderObject {
  PyObject_HEAD PyObject* hashable;  // upstream's _hashable
  PyObject* build_key;               // upstream's _build_key
  PyObject* not_hashable;            // upstream's sentinel
  PyObject* precomputed;             // upstream's _PRECOMPUTED_EMBED_ARGS
  PyObject* plan;                    // (signature, hashable, precomputed) -> how to bind a call of it, or None
  PyObject* call_state;              // the state of torch around a call with tensors, or a str to bypass
  PyObject* on_bypass;               // called with (model tag, argument name or "", reason)
  PyObject* to_host;                 // list of device tensors -> list of host copies, or None
  PyObject* seq_tag;                 // "__seq__"
  uint64_t max_bytes;
  bool tensors_only;    // upstream's functions are not the known ones: they do all but the tensors
  BindingPlans* plans;  // owned
};

PyTypeObject* make_key_builder_type();

}  // namespace otk::py
