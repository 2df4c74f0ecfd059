// The roles of a CTA that attends to prompts.
//
// A CTA fills a multiprocessor and takes one tile after another, dynamically, so that all CTAs end at about the same time.
//
// Roles, as in FlashAttention-3 (Shah et al., 2024): one thread copies queries, keys and values. Two warpgroups have 64
// queries each. A warpgroup issues a step's scores (S = Q K^T) and then the products of the weights of the step before with its
// values (O += P V); while O is added to, it takes exponentials. Meanwhile the other warpgroup has the tensor cores. They take no
// explicit turns: with named barriers it was not faster. Weights stay in registers, and so do queries: read from shared memory
// for every step, they would be nearly a quarter of the traffic there (8,192 tokens: 657 TFLOP/s, not 736).
//
// A step takes 2 * 128 * 128 * (192 + 128) FLOPs, 2,560 cycles of the tensor cores, and 80 KB of keys and values from the
// second-level cache.

#pragma once

#include "../../cuda/cluster.cuh"
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

// A Producer copies what consumers need, in the order in which they need it, and last a unit without queries.
template <class Producer, bool QUANTIZES, class Arguments>
__device__ __forceinline__ void attend(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.inputs.query_boxes);
    prefetch_map(given.inputs.own_boxes);
    prefetch_map(given.inputs.shared_boxes);
    prefetch_map(given.inputs.value_boxes);
    init_barriers(shared);
  }
  __syncthreads();
  if (threadIdx.x < CONSUMERS * WARPGROUP) {
    take_registers<240>();
    Consumer<QUANTIZES>{shared, given.inputs, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)}.run();
  } else {
    give_registers<24>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) Producer{{shared, given.inputs}, given}.run();
  }
}
