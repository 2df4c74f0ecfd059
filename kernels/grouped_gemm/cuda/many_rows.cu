// Products of experts with many rows in bfloat16, for Hopper (sm_90a): rows lie in order of expert, each expert's directly after the
// previous one's. The time is that of 2 * rows * outputs * inputs operations.
//
// Work. A CTA has 128 rows of one expert's weight and up to 128 or 256 rows of activations, a multiple of 16 of which are multiplied.
// If outputs are gated, every eight rows of the gate are followed by the eight that they gate, so that a thread has sums of both, and
// SwiGLU takes no pass of its own. A cluster of two CTAs has the same activations, which they copy in turns into the shared
// memory of both. Clusters take tiles in an order in which those that run at once share rows and weights in the second-level cache.
// With few rows the weights' bytes take the time: then stages have room for 128 rows, and there are six for four.
//
// Roles in a CTA, as in CUTLASS: one thread copies 64 inputs at a time, and two warpgroups multiply 64 rows of the weight each.

#include "many_rows_products.cuh"

template <bool GATED, int MOST_ROWS>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  auto& shared = *reinterpret_cast<Shared<MOST_ROWS>*>(memory);
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
    Consumer<GATED, MOST_ROWS>{shared, given, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)}.run();
  } else {
    give_registers<24>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) copy_operands<GATED>(shared, given);
  }
  // The neighbour may still copy into this CTA's memory, and arrive at its barriers.
  __syncwarp();
  cluster_meet();
}

#define MANY_ROWS(NAME, GATED, MOST_ROWS)                                                                  \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared<MOST_ROWS>);                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Arguments given) { \
    run<GATED, MOST_ROWS>(given);                                                                          \
  }

MANY_ROWS(many_rows_128, false, 128)
MANY_ROWS(many_rows_256, false, 256)
MANY_ROWS(gated_many_rows_128, true, 128)
MANY_ROWS(gated_many_rows_256, true, 256)
