// Products of experts with many rows in bfloat16, for Hopper (sm_90a): rows lie in order of expert, each expert's directly after the
// previous one's. The time is that of 2 * rows * outputs * inputs operations.
//
// Work. A CTA has 128 rows of one expert's weight and up to 256 rows of activations; of an expert's last rows a multiple of 64. If
// outputs are gated, every eight rows of the gate are followed by the eight that they gate, so that a thread has sums of both, and
// SwiGLU takes no pass of its own. A cluster of two CTAs has the same activations, of which each copies half into the shared
// memory of both. Clusters take tiles in an order in which those that run at once share rows and weights in the second-level cache.
//
// Roles in a CTA, as in CUTLASS: one thread copies 64 inputs at a time, and two warpgroups multiply 64 rows of the weight each.

#include "many_rows_products.cuh"

template <bool GATED>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.x);
    prefetch_map(given.weight);
    shared.prepare();
  }
  cluster_meet();
  start_next();
  wait_for_earlier();
  shared.count_tiles(given);
  if (threadIdx.x < CONSUMERS * WARPGROUP) {
    take_registers<240>();
    Consumer<GATED>{shared, given, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)}.run();
  } else {
    give_registers<24>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) copy_operands<GATED>(shared, given);
  }
  // The neighbour may still copy into this CTA's memory, and arrive at its barriers.
  __syncwarp();
  cluster_meet();
}

#define MANY_ROWS(NAME, GATED)                                                                             \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared);                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Arguments given) { \
    run<GATED>(given);                                                                                     \
  }

MANY_ROWS(many_rows, false)
MANY_ROWS(gated_many_rows, true)
