// One walk over the arguments of a call: upstream's _hashable, with keys for tensors.
#pragma once

#include "key_builder.h"
#include "pending.h"

namespace otk::py {

class Walk {
 public:
  // Becomes the thread's current walk: where upstream's code comes back to _hashable, the keys go to this walk. Walks
  // nest (an argument whose own code encodes a prompt).
  explicit Walk(BuilderObject* owner);
  ~Walk();
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  // The thread's current walk if it belongs to `builder`, or null.
  static Walk* current(BuilderObject* builder);

  // What upstream's _hashable returns for `object`. A new reference (the sentinel where the object cannot be keyed), or
  // null with an error. Tensor keys have no content before fill().
  PyObject* hash_value(PyObject* object);

  // Takes the tensor that is the whole of an argument; its key is made by fill() or look_at_deferred(). Returns where
  // it is in `pending`.
  size_t defer(PyObject* tensor) { return pending.defer(tensor, argument); }

  // To be called before anything but deferred tensors and scalars is walked. As fill().
  bool look_at_deferred();

  // Gives the tensor keys made by this walk their content. False with an error set; after true, `reason` tells whether
  // the call can be keyed, and `argument` which one cannot.
  bool fill();

  bool is_sentinel(PyObject* value) const { return value == builder->not_hashable; }

  BuilderObject* const builder;
  PendingKeys pending;
  Reason reason = Reason::kNone;  // why the last value was not keyed
  PyObject* argument = nullptr;   // borrowed name of the argument that is walked; null where it is not known

 private:
  PyObject* hash_sequence(PyObject* object);
  Ref hash_items(Ref items);
  PyObject* hash_tensor(PyObject* object);
  PyObject* hash_other(PyObject* object);

  Walk* const outer_;
};

// The types whose instances upstream returns unchanged. Exact types only: a subclass goes to upstream's own function.
bool is_exact_scalar(PyObject* object);

}  // namespace otk::py
