// XXH3-128 of strided tensors, each by the threads of one block.
//
// XXH3's accumulators are sums between two scrambles, which are 1,024 bytes apart. So the contributions of a block of
// 1,024 bytes are added up in any order, all blocks at once, and only a short walk over the blocks' sums is serial.
#include "../hash/xxh3.h"
#include "gather.cuh"
#include "request.h"

namespace otk::cuda {
namespace {

constexpr uint32_t kThreads = 512;  // 8 KiB, a prompt of 1,024 int64 IDs, is one 16-byte load for each
constexpr uint32_t kWarp = 32;
constexpr uint32_t kBlock = xxh3::kBlock;
constexpr uint32_t kStripe = xxh3::kStripe;
constexpr uint32_t kStripes = xxh3::kStripesPerBlock;
constexpr uint32_t kLanes = xxh3::kLanes;
constexpr uint32_t kParts = 4;  // threads that share the 16 stripes of one block and lane
constexpr uint32_t kTileBlocks = 32;
constexpr uint32_t kTile = kTileBlocks * kBlock;  // bytes that are worked on at a time

// The memory that the threads of a block share.
struct Shared {
  alignas(16) uint8_t tile[kTile + kStripe];
  uint64_t sums[kTileBlocks][kParts][kLanes];
  uint64_t last[kLanes];  // contributions of the content's last stripe
  uint64_t acc[kLanes];
  uint64_t secret[xxh3::kSecretSize / 8];  // the constant cache serves one address at a time, this memory any
};
static_assert(sizeof(Shared) <= 48 * 1024, "what a kernel gets without asking for more");

// A part of the content. The last tile is up to 63 bytes longer than the others, so that the content's last stripe,
// which may begin before its last block, is never split.
struct Tile {
  uint64_t start;
  uint32_t size;
  uint32_t full_blocks;   // blocks that end in a scramble
  uint32_t rest_stripes;  // whole stripes after them, without the content's last one
  bool last;
};

__device__ uint32_t tile_count(uint64_t nbytes) {
  return nbytes < kStripe ? 1 : static_cast<uint32_t>((nbytes - kStripe) / kTile) + 1;
}

__device__ Tile tile_at(uint64_t nbytes, uint32_t index) {
  Tile tile{uint64_t{index} * kTile, kTile, kTileBlocks, 0, false};
  if (index + 1 < tile_count(nbytes)) return tile;
  tile.last = true;
  tile.size = static_cast<uint32_t>(nbytes - tile.start);
  tile.full_blocks = (tile.size - 1) / kBlock;
  tile.rest_stripes = (tile.size - 1 - tile.full_blocks * kBlock) / kStripe;
  return tile;
}

// Copies a tile to where the host reads it.
__device__ void write_out(const Request& request, const Tile& tile, const Shared& shared) {
  const uint32_t chunks = (tile.size + kMaxUnit - 1) / kMaxUnit;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < chunks; i += kThreads) {
    store(request.content + tile.start + kMaxUnit * i, load<Chunk>(shared.tile + kMaxUnit * i));
  }
}

// What one stripe adds to a lane. `own` and `other` are the stripe's words of that lane and of its neighbour.
__device__ uint64_t contribution(uint64_t own, uint64_t other, uint64_t secret) {
  const uint64_t key = own ^ secret;
  return other + uint64_t{static_cast<uint32_t>(key)} * (key >> 32);
}

// Adds up a tile's contributions, by block, lane and part.
__device__ void sum_stripes(const Tile& tile, Shared& shared) {
  const uint32_t blocks = tile.full_blocks + (tile.rest_stripes > 0 ? 1 : 0);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < blocks * kParts * kLanes; i += kThreads) {
    const uint32_t lane = i % kLanes;
    const uint32_t part = i / kLanes % kParts;
    const uint32_t block = i / (kLanes * kParts);
    const uint32_t limit = block < tile.full_blocks ? kStripes : tile.rest_stripes;
    uint64_t sum = 0;
    for (uint32_t j = 0; j < kStripes / kParts; ++j) {
      const uint32_t stripe = part + kParts * j;  // neighbouring threads read neighbouring words
      const uint8_t* words = shared.tile + block * kBlock + stripe * kStripe;
      if (stripe < limit) {
        sum += contribution(load<uint64_t>(words + 8 * lane), load<uint64_t>(words + 8 * (lane ^ 1)),
                            shared.secret[stripe + lane]);
      }
    }
    shared.sums[block][part][lane] = sum;
  }
  // By threads that have the least to do above.
  const uint32_t lane = kThreads - 1 - threadIdx.x;
  if (tile.last && lane < kLanes) {
    const uint8_t* words = shared.tile + tile.size - kStripe;  // at any address
    const uint8_t* secret = xxh3::secret() + xxh3::kLastStripeSecret;
    shared.last[lane] = contribution(xxh3::read64(words + 8 * lane), xxh3::read64(words + 8 * (lane ^ 1)),
                                     xxh3::read64(secret + 8 * lane));
  }
}

__device__ uint64_t block_sum(const Shared& shared, uint32_t block, uint32_t lane) {
  uint64_t sum = 0;
  for (uint32_t part = 0; part < kParts; ++part) sum += shared.sums[block][part][lane];
  return sum;
}

// The serial rest: one lane through the blocks of a tile.
__device__ void walk_blocks(const Tile& tile, uint32_t lane, Shared& shared) {
  const uint64_t secret = shared.secret[xxh3::kScrambleSecret / 8 + lane];
  uint64_t acc = shared.acc[lane];
  for (uint32_t block = 0; block < tile.full_blocks; ++block) {
    acc += block_sum(shared, block, lane);
    acc = ((acc ^ (acc >> 47)) ^ secret) * xxh3::kPrime32_1;
  }
  if (tile.rest_stripes > 0) acc += block_sum(shared, tile.full_blocks, lane);
  if (tile.last) acc += shared.last[lane];
  shared.acc[lane] = acc;
}

// Two threads, one for each half of the digest.
__device__ void merge(const Request& request, const Shared& shared) {
  const bool low = threadIdx.x == 0;
  const auto* secret = reinterpret_cast<const uint8_t*>(shared.secret);
  const uint64_t start = low ? request.nbytes * xxh3::kPrime64_1 : ~(request.nbytes * xxh3::kPrime64_2);
  const uint64_t merged =
      xxh3::merge(shared.acc, secret + (low ? xxh3::kMergeLowSecret : xxh3::kMergeHighSecret), start);
  (low ? request.digest->low : request.digest->high) = merged;
}

// Every thread takes every barrier: their number depends on the block alone. Between two of them no thread reads what
// another one writes.
//
// Content and digest go to the host's pinned memory by plain stores. No fence is needed: the host reads them after it
// has synchronized with the stream, and the end of a kernel makes all its writes visible to the host before that
// returns.
__global__ void __launch_bounds__(kThreads) read_tensors(const __grid_constant__ Batch batch) {
  __shared__ Shared shared;
  const Request& request = batch.requests[blockIdx.x];
  const uint32_t tiles = tile_count(request.nbytes);
  const bool is_long = request.nbytes > xxh3::kMidMax;
  if (threadIdx.x < xxh3::kSecretSize / 8) {
    shared.secret[threadIdx.x] = load<uint64_t>(xxh3::secret() + 8 * threadIdx.x);
  }
  if (threadIdx.x == 0) xxh3::initialize(shared.acc);
  for (uint32_t index = 0;; ++index) {
    // While the first warp walks the tile before, the others bring the next one.
    const uint32_t busy = index > 0 ? kWarp : 0;
    if (index > 0 && threadIdx.x < kLanes) walk_blocks(tile_at(request.nbytes, index - 1), threadIdx.x, shared);
    if (index == tiles) break;
    const Tile tile = tile_at(request.nbytes, index);
    if (threadIdx.x >= busy) {
      gather(request, tile.start, tile.size, threadIdx.x - busy, kThreads - busy, shared.tile);
    }
    __syncthreads();
    write_out(request, tile, shared);
    if (!is_long) break;
    sum_stripes(tile, shared);
    __syncthreads();
  }
  __syncthreads();
  if (is_long && threadIdx.x < 2) merge(request, shared);
  if (!is_long && threadIdx.x == 0) *request.digest = xxh3::hash_short(shared.tile, request.nbytes);
}

}  // namespace

cudaError_t load_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(read_tensors));
}

cudaError_t launch_batch(const Batch& batch, uint32_t count, cudaStream_t stream) {
  // Not <<<>>>, which tells of an error only through cudaGetLastError(), that is, mixed up with older ones.
  void* arguments[] = {const_cast<Batch*>(&batch)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(read_tensors), dim3(count), dim3(kThreads), arguments, 0,
                          stream);
}

}  // namespace otk::cuda
