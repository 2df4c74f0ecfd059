// Block-scaled products of FP8 weights with many rows of activations, for Hopper (sm_90a): of a linear layer, and of experts whose
// rows are sorted by expert. The time is that of 2 * rows * outputs * inputs operations.
//
// Work. A tile is 128 rows by WIDTH outputs. A cluster of two CTAs computes two tiles with something in common, of which each copies
// half into the shared memory of both: wide tiles lie one below the other and share the weight, others lie side by side and share
// the activations. Two tiles of sorted rows may belong to different experts; then each CTA copies its own weight. Clusters take tiles
// in an order in which those that run at once share rows and outputs in the second-level cache. The card's power limits large
// products, so what counts is how little is moved: a wide tile reads 32 KB for 8.4 million products.
//
// Roles in a CTA, as in DeepGEMM (DeepSeek, 2025): one thread copies activations and weights, 128 inputs at a time, one warp
// copies their scales, and two warpgroups have 64 rows each. The tensor cores sum the products of 128 inputs, which a warpgroup
// then scales and adds up in float32 (DeepSeek-V3, 2024, section 3.3); meanwhile the other warpgroup has the tensor cores. The copy
// engine stores the sums while the next tile is computed. `notes.md` has what was tried.

#include "many_rows_copies.cuh"
#include "many_rows_products.cuh"

template <int WIDTH, bool SORTED>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  using Memory = Shared<WIDTH>;
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.x);
    prefetch_map(given.weight);
    shared.prepare();
  }
  cluster_meet();
  start_next();
  wait_for_earlier();
  if (threadIdx.x < CONSUMERS * WARPGROUP) {
    take_registers<232>();
    Consumer<WIDTH, SORTED>{shared, given, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)}.run();
  } else {
    give_registers<40>();
    int warp = threadIdx.x % WARPGROUP / 32;
    if (warp == 0 && threadIdx.x % 32 == 0) Copier<WIDTH, SORTED>{shared, given}.copy_operands();
    if (warp == 1) Copier<WIDTH, SORTED>{shared, given}.copy_scales();
  }
  // The neighbour may still copy into this CTA's memory, and arrive at its barriers.
  __syncwarp();
  cluster_meet();
}

#define MANY_ROWS(NAME, WIDTH, SORTED)                                                                     \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared<WIDTH>);                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Arguments given) { \
    run<WIDTH, SORTED>(given);                                                                             \
  }

MANY_ROWS(many_rows_64, 64, false)
MANY_ROWS(many_rows_128, 128, false)
MANY_ROWS(many_rows_256, 256, false)
MANY_ROWS(sorted_rows_256, 256, true)
