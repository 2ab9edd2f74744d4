// KeyBuilder: the object whose two methods stand in for upstream's _hashable and _build_key.
#pragma once

#include <stdint.h>

#include "python.h"

namespace otk::py {

class BindingPlans;
class Era;

struct BuilderObject {
  PyObject_HEAD PyObject* hashable;  // upstream's _hashable
  PyObject* build_key;               // upstream's _build_key
  PyObject* not_hashable;            // upstream's sentinel
  PyObject* precomputed;             // upstream's _PRECOMPUTED_EMBED_ARGS
  PyObject* to_host;                 // list of device tensors -> list of host copies, or None
  PyObject* seq_tag;                 // "__seq__"
  PyObject* bypassed;                // {(model tag, argument name, reason): number of calls}
  PyObject* on_bypass;               // called with (model tag, argument name, reason, number) now and then, or None
  uint64_t max_bytes;
  Era* era;             // owned; when it is over, upstream's functions do everything
  bool tensors_only;    // upstream's functions are not the known ones: they do all but the tensors
  BindingPlans* plans;  // owned
};

// Counts a call that bypasses the cache because of argument `name` (empty: unknown, or the arguments do not bind), and
// tells on_bypass of the 16th, 256th, 4096th, ... one. Returns a new reference to None, or null with an error.
PyObject* bypass(BuilderObject* builder, PyObject* model_tag, PyObject* name, const char* reason);

PyTypeObject* make_key_builder_type();

}  // namespace otk::py
