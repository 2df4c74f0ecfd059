// Attention over ragged prompts of bf16, for Hopper (sm_90a): keys 192 wide, values 128.
//
// Work. A tile is 128 queries of one head of a prompt against all keys that they see, 128 at a time. A CTA fills a
// multiprocessor and takes one tile after another; tiles with most keys come first, so that all CTAs end at about the same time.
//
// Roles in a CTA, as in FlashAttention-3 (Shah et al., 2024): one thread copies queries, keys and values. Two warpgroups have 64
// queries each. A warpgroup issues a block's scores (S = Q K^T) and then the products of the weights of the block before with its
// values (O += P V); while O is added to, it takes exponentials. Meanwhile the other warpgroup has the tensor cores. They take no
// explicit turns: with named barriers it was not faster. Weights stay in registers, and so do queries: read from shared memory
// for every block, they would be nearly a quarter of the traffic there (8,192 tokens: 657 TFLOP/s, not 736).
//
// A block takes 2 * 128 * 128 * (192 + 128) FLOPs, 2,560 cycles of the tensor cores, and 80 KB of keys and values from the
// second-level cache. A prompt's last keys come first: the diagonal is masked before the loop, and CTAs with different tiles of a
// head read different blocks at a time. In the other direction they all read the same blocks at once, which takes 7 to 15% longer.
// `notes.md` has what was tried.

#include "../../cuda/cluster.cuh"
#include "../../cuda/registers.cuh"
#include "consume.cuh"
#include "produce.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int half = 0; half < CONSUMERS; half++) {
    init_barrier(&shared.query_full[half], 1);
    init_barrier(&shared.query_empty[half], WARPGROUP / 32);
  }
  for (int stage = 0; stage < STAGES; stage++) {
    init_barrier(&shared.key_full[stage], 1);
    init_barrier(&shared.value_full[stage], 1);
    init_barrier(&shared.key_empty[stage], CONSUMERS * WARPGROUP / 32);
    init_barrier(&shared.value_empty[stage], CONSUMERS * WARPGROUP / 32);
  }
  fence_barrier_init();
}

extern "C" __device__ int attend_prompts_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prompts(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.query_boxes);
    prefetch_map(given.key_boxes);
    prefetch_map(given.value_boxes);
    init_barriers(shared);
  }
  __syncthreads();
  if (threadIdx.x < CONSUMERS * WARPGROUP) {
    take_registers<240>();
    Consumer{shared, given, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)}.run();
  } else {
    give_registers<24>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) Producer{shared, given}.run();
  }
}
