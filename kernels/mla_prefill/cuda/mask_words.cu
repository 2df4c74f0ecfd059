// Chosen keys as bits, a CTA for a query (sm_90).
//
// Bits are set in shared memory, those of HELD words at a time: each chosen position is read once, and a mask's words are written
// once, 16 bytes together. A thread that looks for its word's positions in memory instead takes their latency many times.

#include "../../cuda/hopper.cuh"

constexpr int THREADS = 128, HELD = 1024;

struct Arguments {
  // [queries, count], then -1
  const u32* tokens;
  // [blocks, rows, 4], blocks `block_words` words apart
  u32* mask;
  long long block_words;
  int count, blocks;
};

extern "C" __global__ void __launch_bounds__(THREADS) write_mask(const __grid_constant__ Arguments given) {
  __shared__ alignas(16) u32 bits[HELD];
  wait_for_earlier();
  start_next();
  const u32* tokens = given.tokens + (long long)blockIdx.x * given.count;
  for (int begin = 0; begin < given.blocks; begin += HELD / 4) {
    int blocks = min(given.blocks - begin, HELD / 4);
    uint4* own = reinterpret_cast<uint4*>(bits);
    for (int block = threadIdx.x; block < blocks; block += THREADS) own[block] = make_uint4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < given.count; i += THREADS) {
      // -1 is larger than any position.
      u32 token = tokens[i], word = token / 32 - begin * 4;
      if (word < blocks * 4) atomicOr(&bits[word], 1u << token % 32);
    }
    __syncthreads();
    for (int block = threadIdx.x; block < blocks; block += THREADS)
      *reinterpret_cast<uint4*>(given.mask + (begin + block) * given.block_words + blockIdx.x * 4) = own[block];
  }
}
