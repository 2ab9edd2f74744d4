// One walk over the arguments of a call: upstream's _hashable, with keys for tensors.
#pragma once

#include "key_builder.h"
#include "tensor_reader.h"

namespace otk::py {

class Walk {
 public:
  // Becomes the thread's current walk: where upstream's code comes back to _hashable, the tensors go to this walk.
  // Walks nest (an argument whose own code encodes a prompt).
  explicit Walk(BuilderObject* owner);
  ~Walk();
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  // The thread's current walk if it belongs to `builder`, or null.
  static Walk* current(BuilderObject* builder);

  // What upstream's _hashable returns for `object`, but with the tensors themselves: replace_tensors() puts their keys
  // in place. A new reference (the sentinel where the object cannot be keyed), or null with an error.
  PyObject* hash_value(PyObject* object);

  // Ends the walk and reads its tensors, if there are any. False with an error set; after true, `reason` or `state`
  // tells whether the call can be keyed, and `argument` which one cannot.
  bool read();

  // After read(): the value with a key in the place of each tensor. Null with an error.
  Ref replace_tensors(PyObject* value);

  bool is_sentinel(PyObject* value) const { return value == builder->not_hashable; }
  bool is_refused() const { return reason != Reason::kNone || (state && PyUnicode_Check(state.get())); }

  // Tells on_bypass why, and returns a new reference to None; null with an error.
  PyObject* bypass(PyObject* model_tag);
  PyObject* bypass(PyObject* model_tag, const char* why);

  BuilderObject* const builder;
  TensorReader tensors;
  Reason reason = Reason::kNone;  // why the last value was not keyed
  Ref state;                      // what call_state() returned: a str says why the call must bypass; null: no tensors
  PyObject* argument = nullptr;   // borrowed name of the argument that is walked; null where it is not known

 private:
  PyObject* hash_sequence(PyObject* object);
  Ref hash_items(Ref items);
  PyObject* hash_other(PyObject* object);
  PyObject* refuse(Reason why);

  Walk* const outer_;
};

// The types whose instances upstream returns unchanged. Exact types only: a subclass goes to upstream's own function.
bool is_exact_scalar(PyObject* object);

}  // namespace otk::py
