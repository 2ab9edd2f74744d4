// Reading CUDA tensors into their keys with the CUDA unit.
#pragma once

#include <vector>

#include "pending.h"

namespace otk::py {

// What the CUDA unit in this build was compiled with and for, or null in a build without it.
extern const char* const cuda_build;

// Whether this thread's CUDA tensors are read by the unit, where there is one. Tests and benchmarks turn it off.
extern thread_local bool cuda_unit_wanted;

// The same, unless the unit was found to read wrongly.
bool cuda_unit_used();

// Fills those of `items` that are CUDA tensors. The others stay as they are, and so do those that the unit cannot read
// here; why is logged once. False with an error set; `reason` says why the call must bypass instead.
bool read_cuda(const std::vector<PendingKey*>& items, uint64_t max_bytes, Reason& reason);

}  // namespace otk::py
