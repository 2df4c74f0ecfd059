// Absorbed decode attention over a paged pool of bf16 latents, for Hopper (sm_90a).
//
// Work. A CTA computes 64 rows of the score matrix (64 heads of one query, or as many as there are) against the latents of a
// request, a block of 64 tokens at a time. All blocks of all requests are divided into parts (`parts.cu`). A part belongs to as
// many CTAs as there are row tiles, in clusters of two if their number is even: the two read every block together, half each.
//
// Roles in a CTA: one warp copies blocks. One warpgroup computes scores (S = Q K^T) and leaves probabilities in shared memory.
// Two more warpgroups hold 256 channels of O each and add P V. Products of different warps take turns, and a warp cannot run
// ahead of its own products by more than a few. So all scores of a block are issued before the probabilities of the block
// before are published: the two value warpgroups then have the tensor cores while the scoring one takes exponentials. Shared
// memory holds 3 of a query's 9 chunks and the scoring warpgroup's registers the other 6, which leaves room for two and three
// quarter blocks: one being scored, one being added, the rest on its way. The chunks that registers hold pass through the ring
// of blocks.
//
// Bytes: 1,152 a token, once from memory for two row tiles. FLOPs: 2 * 64 * (576 + 512) per token and row tile, which is 2,176
// cycles a block. Shared memory is written and read by 279 KB a block and row tile, 2,180 cycles; memory needs 2,000 cycles for
// a block of each of 66 clusters. Measured on an H200, with two more waits in it: 2,810 cycles a block. That is the chain of
// the scoring warpgroup: 1,320 cycles until its products are issued, 160 until they are done, and 1,250 for the softmax and its
// stores, during which the other warpgroups' products take 1,240. Alone the softmax takes 675 (products use the registers'
// bandwidth). With room for a quarter of a block less it was 2,910, and single blocks took between 2,300 and 3,860. Under
// steady load the card's power limit lowers its clock from 1.98 to about 1.6 GHz. `notes.md` has what was tried.

#include "bf16_roles.cuh"
#include "bf16_produce.cuh"

template <int CTAS>
__device__ __forceinline__ void attend(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.pool_boxes);
    prefetch_map(given.query_boxes);
  }
  init_barriers<CTAS>(shared);
  if (CTAS > 1) cluster_meet(); else __syncthreads();
  if (threadIdx.x < VALUE_THREADS) {
    take_registers<160>();
    add_values_of_part<CTAS>(shared, given, own_place<CTAS>(given.work), __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  } else if (threadIdx.x < VALUE_THREADS + SCORE_THREADS) {
    take_registers<160>();
    score_part<CTAS>(shared, given, own_place<CTAS>(given.work));
  } else {
    give_registers<32>();
    if (threadIdx.x < VALUE_THREADS + SCORE_THREADS + 32) produce<CTAS>(shared, given, own_place<CTAS>(given.work));
  }
  // A CTA must not exit while the other may still arrive at its barriers.
  if (CTAS > 1) {
    __syncwarp();
    cluster_meet();
  }
}

extern "C" __device__ int decode_pair_shared_bytes = sizeof(Shared), decode_single_shared_bytes = sizeof(Shared);

#define DECODE extern "C" __global__ void __launch_bounds__(THREADS, 1)

DECODE __cluster_dims__(2, 1, 1) decode_pair(const __grid_constant__ Arguments given) { attend<2>(given); }

DECODE decode_single(const __grid_constant__ Arguments given) { attend<1>(given); }
