// Chosen keys as bits, a thread for 32 of them (sm_90).
//
// A query's chosen positions ascend, so a thread finds its first one by halving and reads on. Reads 4 bytes of each position that is
// chosen, some of them several times from the first-level cache, and writes a bit of each key.

#include "../../cuda/hopper.cuh"

constexpr int THREADS = 128;

struct Arguments {
  // [queries, count], ascending, then -1
  const u32* tokens;
  // [blocks, rows, 4], blocks `block_words` words apart
  u32* mask;
  long long block_words;
  int count, blocks;
};

extern "C" __global__ void __launch_bounds__(THREADS) write_mask(const __grid_constant__ Arguments given) {
  wait_for_earlier();
  start_next();
  const u32* tokens = given.tokens + (long long)blockIdx.x * given.count;
  for (int word = threadIdx.x; word < given.blocks * 4; word += THREADS) {
    u32 first = word * 32, bits = 0;
    int low = 0, high = given.count;
    while (low < high) {
      int middle = (low + high) / 2;
      // -1 is larger than any position.
      if (tokens[middle] < first) low = middle + 1;
      else high = middle;
    }
    for (; low < given.count && tokens[low] - first < 32; low++) bits |= 1u << tokens[low] % 32;
    given.mask[word / 4 * given.block_words + blockIdx.x * 4 + word % 4] = bits;
  }
}
