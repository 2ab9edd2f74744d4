// The kernel's phases on the host, for ctypes: a barrier is the end of a loop over the threads.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "../../csrc/cuda/phases.h"

using namespace otk::cuda;

enum Order : int { kForward, kReverse, kRandom };

// Reads one tensor with `threads` threads. Returns 0 for a layout that the kernel does not read. `content` has room for
// the size rounded up to kMaxUnit.
extern "C" int otk_host_run(const OtkCudaTensor* tensor, uint32_t threads, int order, uint64_t seed, uint8_t* content,
                            uint64_t* digest) {
  Request request{};
  if (!plan(*tensor, request)) return 0;
  otk::xxh3::Digest result{};
  request.content = content;
  request.digest = &result;
  // On the heap for the sanitizers, and filled: a GPU does not clear it.
  const auto shared = std::make_unique<Shared>();
  memset(static_cast<void*>(shared.get()), 0xC3, sizeof(Shared));
  std::vector<uint32_t> turns(threads);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == kReverse) std::reverse(turns.begin(), turns.end());
  std::mt19937_64 random(seed);
  for (uint32_t phase = 0; phase < phase_count(request); ++phase) {
    if (order == kRandom) std::shuffle(turns.begin(), turns.end(), random);
    for (const uint32_t thread : turns) run_phase(request, phase, thread, threads, *shared);
  }
  digest[0] = result.low;
  digest[1] = result.high;
  return 1;
}

// What the layout is read as, for tests of the plan.
extern "C" void otk_host_plan(const OtkCudaTensor* tensor, uint32_t* unit, uint32_t* ndim) {
  Request request{};
  *unit = plan(*tensor, request) ? request.unit : 0;
  *ndim = request.ndim;
}
