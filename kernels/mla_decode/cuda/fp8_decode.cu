// Absorbed decode attention over a paged pool of e4m3 latents, products in FP8, for Hopper (sm_90a).
//
// Work. A CTA computes 64 rows of the score matrix (64 heads of one query, or as many as there are) against the latents of a
// request, a block of 64 tokens at a time. All blocks of all requests are divided into parts (`parts.cu`). A part belongs to as
// many CTAs as there are row tiles, in clusters of two if their number is even: the two read every block together, half each.
// `combine` joins the pieces of split requests.
//
// Roles in a CTA: one warpgroup copies blocks. One computes scores (S = Q K^T, both operands from shared memory) and leaves
// probabilities in e4m3 where the block's rope keys were. Two more accumulate 256 of the 512 value channels each, transposed:
// O^T = V^T P^T, two blocks in the tensor cores' own sums, which have too few bits for more, and those in float32.
// FP8 tensor cores want the summed dimension contiguous, and tokens of V are not. As the first operand, from registers, V^T
// needs no second copy, only a transposing load and a byte permutation. The permutation fixes an order of tokens within 16, and
// the scores' registers already have that order. All scores of a block are issued before the probabilities of the block before
// are published: the value warpgroups then have the tensor cores while the scoring one takes exponentials. A piece's queries
// pass through the ring of blocks before its first block; the scoring warpgroup quantizes them.
//
// Bytes: 576 a token, once from memory for two row tiles. FLOPs: 2 * 64 * (576 + 512) per token and row tile, which is 1,088
// cycles a block. Shared memory is read and written by 172 KB a block and row tile, 1,376 cycles. Measured on an H200 with 64
// requests: 2,150 cycles a block, before sums were in float32, which adds 6%. That is the chain of the scoring warpgroup: 620
// cycles until its products are issued, 310 until they are done, 790 for the softmax, and 220 until the probabilities are
// published and the next block has arrived. The value warpgroups wait 740 of them. `notes.md` has what was tried.

#include "fp8_produce.cuh"
#include "fp8_roles.cuh"

template <int CTAS>
__device__ __forceinline__ void attend(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.latents);
    prefetch_map(given.keys);
    prefetch_map(given.queries);
  }
  init_barriers<CTAS>(shared);
  if (threadIdx.x == 0) shared.place = own_place<CTAS>(given.work);
  if (CTAS > 1) cluster_meet(); else __syncthreads();
  if (threadIdx.x < VALUE_THREADS) {
    take_registers<VALUE_REGISTERS>();
    add_values_of_part<CTAS>(shared, given, __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  } else if (threadIdx.x < VALUE_THREADS + SCORE_THREADS) {
    give_registers<SCORE_REGISTERS>();
    score_part<CTAS>(shared, given);
  } else {
    give_registers<PRODUCER_REGISTERS>();
    produce<CTAS>(shared, given);
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
