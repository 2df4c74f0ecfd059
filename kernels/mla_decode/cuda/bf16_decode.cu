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

#include "bf16_score.cuh"
#include "bf16_values.cuh"
#include "bf16_produce.cuh"

constexpr int PRODUCERS = 128, THREADS = VALUE_THREADS + SCORE_THREADS + PRODUCERS;

template <int CTAS>
__device__ __forceinline__ Place own_place(const Work& work) {
  u32 rank = CTAS > 1 ? cluster_rank() : 0;
  int tiles = (work.heads + HEADS - 1) / HEADS, clusters = tiles * work.query_tokens / CTAS, cluster = blockIdx.x / CTAS;
  int tile = cluster % clusters * CTAS + rank;
  return {work.part(cluster / clusters), tile / tiles, tile % tiles * HEADS, rank};
}

// Copies the chunks of a piece's query that stay in shared memory.
__device__ __forceinline__ void fetch_query(Shared& shared, const Arguments& given, const Place& place, int index) {
  if (index >= place.part.end || threadIdx.x % 128) return;
  long long first = first_row_of(given.work, place, given.work.pieces[index].request);
  arrive_and_expect(&shared.query_full, sizeof(shared.query));
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS - HELD_CHUNKS; chunk++)
    copy_box(shared.query[chunk], given.query_boxes, chunk * CHUNK * 2, first, &shared.query_full);
}

template <int CTAS>
__device__ __forceinline__ void finish_scores(float (&scores)[32], Shared& shared) {
  wgmma_wait<0>();
  pin(scores);
  release<CTAS>(&shared.key_empty);
}

// The scoring warpgroup: for every piece of the part, scores to probabilities, block by block.
template <int CTAS>
__device__ __forceinline__ void score_part(Shared& shared, const Arguments& given, const Place& place) {
  RingPosition ring;
  Query query;
  wait_for_queries();
  fetch_query(shared, given, place, place.part.begin);
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = given.work.pieces[index];
    int left = given.work.lengths[piece.request] - piece.first * BLOCK;
    int hidden = given.work.query_tokens - 1 - place.query_index;
    Softmax state{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    float scores[32];
    take_held<CTAS>(query, shared, ring);
    wait(&shared.query_full, (index - place.part.begin) & 1);
    score(scores, shared, query, ring, false);
#pragma unroll 1
    for (int block = piece.first;; block++) {
      bool last = block + 1 == piece.last;
      // Wait until the probabilities of two blocks before have been read, while this block's products are in flight.
      wait(&shared.probabilities_empty[ring.count & 1], (ring.count / 2 & 1) ^ 1);
      finish_scores<CTAS>(scores, shared);
      if (last) fetch_query(shared, given, place, index + 1);
      to_probabilities(scores, state, shared, given.scale_log2, left - hidden, ring.count);
      if (left < BLOCK) clear_rest(shared, ring, left);
      left -= BLOCK;
      store_sums(shared, state, ring.count, last);
      ring.next();
      if (last) break;
      // If the next block is still on its way, publish first: the value warpgroups must not wait for it.
      bool ready = __all_sync(~0u, arrived(&shared.full[ring.slot_of(0)], ring.phase_of(0)));
      if (!ready) publish(shared, ring.count - 1);
      score(scores, shared, query, ring, ready);
      if (ready) publish(shared, ring.count - 1);
    }
    publish(shared, ring.count - 1);
  }
}

// A value warpgroup: for every piece of the part, half of the channels.
template <int CTAS>
__device__ __forceinline__ void add_values_of_part(Shared& shared, const Arguments& given, const Place& place, int half) {
  const Work& work = given.work;
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, rows = work.heads - place.first_head;
  RingPosition ring;
  wait_for_queries();
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = work.pieces[index];
    float out[2][64];
    ring.skip(HELD_PAIRS);
#pragma unroll 1
    for (int block = piece.first;; block++) {
      add_block<CTAS>(out, shared, ring, half, row, block == piece.first);
      if (block + 1 == piece.last) break;
      release_probabilities(shared, ring);
      ring.next();
    }
    int buffer = ring.count & 1;
    float inverse[2] = {shared.inverse[buffer][row], shared.inverse[buffer][row + 8]};
    float log_sum[2] = {shared.log_sum[buffer][row], shared.log_sum[buffer][row + 8]};
    release_probabilities(shared, ring);
    ring.next();
    long long target = row_of(work, piece, place.query_index, place.first_head);
    u32* values = (piece.whole() ? work.out : work.values) + target * (LATENT / 2) + half * (LATENT / 4);
    store_values(out[0], inverse, values, row, rows);
    store_values(out[1], inverse, values + LATENT / 8, row, rows);
    if (piece.whole() || half || threadIdx.x % 4) continue;
    if (row < rows) work.log_sums[target + row] = log_sum[0];
    if (row + 8 < rows) work.log_sums[target + row + 8] = log_sum[1];
  }
}

template <int CTAS>
__device__ __forceinline__ void init_barriers(Shared& shared) {
  if (threadIdx.x) return;
  init_barrier(&shared.query_full, 1);
  init_barrier(&shared.key_full, 1);
  init_barrier(&shared.key_empty, CTAS);
  for (int buffer = 0; buffer < 2; buffer++) {
    init_barrier(&shared.probabilities_full[buffer], SCORE_THREADS / 32);
    init_barrier(&shared.probabilities_empty[buffer], VALUE_WARPS);
  }
  for (int slot = 0; slot < SLOTS; slot++) {
    init_barrier(&shared.full[slot], 1);
    init_barrier(&shared.empty[slot], CTAS);
  }
  fence_barrier_init();
}

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
