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
#include "fp8_score.cuh"
#include "fp8_values.cuh"

// Registers of a thread, by role: 65,536 in all. A value thread needs 128 for its sums and 32 for those of the tensor cores.
constexpr int VALUE_REGISTERS = 184, SCORE_REGISTERS = 112, PRODUCER_REGISTERS = 32;

template <int CTAS>
__device__ __forceinline__ Place own_place(const Work& work) {
  u32 rank = CTAS > 1 ? cluster_rank() : 0;
  int tiles = (work.heads + HEADS - 1) / HEADS, clusters = tiles * work.query_tokens / CTAS, cluster = blockIdx.x / CTAS;
  int tile = cluster % clusters * CTAS + rank;
  return {work.part(cluster / clusters), tile / tiles, tile % tiles * HEADS, rank};
}

// The scoring warpgroup: for every piece of the part, scores to probabilities, block by block.
template <int CTAS>
__device__ __forceinline__ void score_part(Shared& shared, const Arguments& given) {
  const Work& work = given.work;
  const Place& place = shared.place;
  Ring ring;
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = work.pieces[index];
    int left = work.lengths[piece.request] - piece.first * BLOCK - (work.query_tokens - 1 - place.query_index);
    int rows = work.heads - place.first_head;
    if (index == place.part.begin) wait_for_queries();
    float scale[2] = {}, scores[32];
    take_query<CTAS>(scale, shared, ring, rows, given.scale_log2 * given.kv_scale);
    Softmax state{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    wait(&shared.full[ring.stage], ring.phase);
    score(scores, shared, ring);
#pragma unroll 1
    for (int block = piece.first;; block++) {
      bool last = block + 1 == piece.last;
      int stage = ring.stage;
      await_scores(scores, shared, ring);
      to_probabilities(scores, state, shared, scale, left, ring);
      ring.next();
      left -= BLOCK;
      if (last) {
        long long target = row_of(work, piece, place.query_index, place.first_head);
        store_sums(shared, state, given.kv_scale, piece.whole() ? nullptr : work.log_sums + target, work.heads - place.first_head, stage);
        publish(shared, stage);
        break;
      }
      // If the next block is still on its way, publish first: the value warpgroups must not wait for it.
      bool ready = __all_sync(~0u, arrived(&shared.full[ring.stage], ring.phase));
      if (!ready) {
        publish(shared, stage);
        wait(&shared.full[ring.stage], ring.phase);
      }
      score(scores, shared, ring);
      if (ready) publish(shared, stage);
    }
  }
}

// A value warpgroup: for every piece of the part, half of the channels.
template <int CTAS>
__device__ __forceinline__ void add_values_of_part(Shared& shared, const Arguments& given, int group) {
  const Work& work = given.work;
  const Place& place = shared.place;
  Ring ring;
  wait_for_queries();
#pragma unroll 1
  for (int index = place.part.begin; index < place.part.end; index++) {
    float out[4][32] = {};
    ring.advance();
    ring.advance();
    add_piece<CTAS>(out, shared, ring, work.pieces[index].last - work.pieces[index].first, group);
    float2 inverse[8];
#pragma unroll
    for (int i = 0; i < 8; i++) inverse[i] = reinterpret_cast<const float2*>(shared.inverse[ring.stage])[i * 4 + threadIdx.x % 4];
    values_meet(group);
    release_tile<CTAS>(shared, ring.stage);
    ring.next();
    // Read again, as registers are scarce.
    Piece piece = work.pieces[index];
    u32* target = (piece.whole() ? work.out : work.values) + row_of(work, piece, place.query_index, place.first_head) * (LATENT / 2);
    store_values(out, inverse, target, work.heads - place.first_head, group);
  }
}

template <int CTAS>
__device__ __forceinline__ void init_barriers(Shared& shared) {
  if (threadIdx.x) return;
  for (int parity = 0; parity < 2; parity++) init_barrier(&shared.scored[parity], SCORE_THREADS / 32);
  for (int stage = 0; stage < STAGES; stage++) {
    init_barrier(&shared.probabilities_full[stage], SCORE_THREADS / 32);
    init_barrier(&shared.full[stage], 1);
    init_barrier(&shared.empty[stage], 2 * CTAS);
  }
  fence_barrier_init();
}

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
