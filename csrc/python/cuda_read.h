// Reading CUDA tensors into their keys with the CUDA unit.
#pragma once

#include <vector>

#include "pending.h"

namespace otk::py {

// What the CUDA unit in this build was compiled with and for, or null in a build without it.
extern const char* const cuda_build;

// Whether CUDA tensors are read by the unit, where there is one; guarded by the GIL. Tests and benchmarks turn it off.
extern bool cuda_unit_wanted;

// Fills those of `items` that are CUDA tensors. The others stay as they are, and so do those that the unit cannot read
// here; why is logged once. False with an error set; `reason` says why the call must bypass instead.
bool read_cuda(const std::vector<PendingKey*>& items, uint64_t max_bytes, Reason& reason);

}  // namespace otk::py
