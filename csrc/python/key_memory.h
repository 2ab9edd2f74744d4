// The memory of TensorKeys.
#pragma once

#include <stddef.h>

namespace otk::py {

// Memory for an object of `size` bytes, not cleared; null where there is none, without an error set. With the GIL.
void* allocate_key(size_t size);

// Takes it back. With the GIL.
void free_key(void* memory, size_t size);

}  // namespace otk::py
