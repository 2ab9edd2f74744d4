// The kernel's phases by real threads with a real barrier, for ThreadSanitizer: it reports a missing barrier as a race
// on the shared memory. Ends with 1 where a digest is wrong; the sanitizer ends it with 66 where there is a race. With
// WITHOUT_BARRIER there is one, for the test that it would be found.
#include <pthread.h>
#include <stdio.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/cuda/phases.h"
#include "../../csrc/xxh3_dispatch.h"

using namespace otk::cuda;

namespace {

constexpr uint32_t kThreads = 64;  // more than a warp: other threads gather than walk

bool check(size_t items, uint32_t item_size, int64_t stride) {
  std::vector<uint8_t> storage(items * item_size * stride);
  std::mt19937 random(static_cast<uint32_t>(items));
  for (uint8_t& byte : storage) byte = static_cast<uint8_t>(random());
  OtkCudaTensor tensor{storage.data(), items * item_size, item_size, 1, {static_cast<int64_t>(items)}, {stride}};
  std::vector<uint8_t> expected;
  for (size_t i = 0; i < items * item_size; ++i) {
    expected.push_back(storage[i / item_size * item_size * stride + i % item_size]);
  }
  struct alignas(16) Block {
    uint8_t bytes[16];
  };
  std::vector<Block> content(tensor.nbytes / 16 + 1);
  otk::xxh3::Digest digest{};
  Request request{};
  if (!plan(tensor, request)) return false;
  request.content = content.data()->bytes;
  request.digest = &digest;
  const auto shared = std::make_unique<Shared>();
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, kThreads);
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t phase = 0; phase < phase_count(request); ++phase) {
#if !defined(WITHOUT_BARRIER)
        if (phase > 0) pthread_barrier_wait(&barrier);
#endif
        run_phase(request, phase, thread, kThreads, *shared);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  pthread_barrier_destroy(&barrier);
  const otk::xxh3::Digest right = otk::xxh3::hash(expected.data(), expected.size());
  return digest.low == right.low && digest.high == right.high &&
         memcmp(content.data(), expected.data(), expected.size()) == 0;
}

}  // namespace

int main() {
  for (const size_t size : {1, 16, 240, 241, 1024, 1025, 8192, 32768, 32831, 32832, 33000, 66000, 131072}) {
    for (const int64_t stride : {1, 3}) {
      for (const uint32_t item_size : {1, 8}) {
        const size_t items = size / item_size + 1;
        if (check(items, item_size, stride)) continue;
        printf("wrong: %zu items of %u bytes, stride %d\n", items, item_size, static_cast<int>(stride));
        return 1;
      }
    }
  }
  return 0;
}
