#include "key_memory.h"

#include <utility>

#include "python.h"

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, size) ((void)(memory), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(memory, size) ((void)(memory), (void)(size))
#endif

namespace otk::py {
namespace {

// A hit makes keys and drops them, and the next sample of the prompt makes keys of the same sizes. malloc() takes a
// tenth of a key's time for blocks that are too large for its own lists of freed ones. Guarded by the GIL.
struct Block {
  void* memory;
  size_t size;  // 0: none
};
Block kept[4];  // as many as most calls have tensors, and more
size_t oldest = 0;

// CPython's own allocator is quick with up to 512 bytes; and no more than 1 MiB is kept.
bool is_kept(size_t size) { return size > 512 && size <= 256 * 1024; }

}  // namespace

void* allocate_key(size_t size) {
  if (!is_kept(size)) return PyObject_Malloc(size);
  for (Block& block : kept) {
    if (block.size != size) continue;
    ASAN_UNPOISON_MEMORY_REGION(block.memory, size);
    block.size = 0;
    return block.memory;
  }
  return PyObject_Malloc(size);
}

void free_key(void* memory, size_t size) {
  Block freed{memory, size};
  if (is_kept(size)) {
    ASAN_POISON_MEMORY_REGION(memory, size);
    std::swap(freed, kept[oldest]);
    oldest = (oldest + 1) % (sizeof kept / sizeof kept[0]);
    if (freed.size == 0) return;
    ASAN_UNPOISON_MEMORY_REGION(freed.memory, freed.size);
  }
  PyObject_Free(freed.memory);
}

}  // namespace otk::py
