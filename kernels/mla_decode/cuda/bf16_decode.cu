// Absorbed decode attention over a paged pool of bf16 latents, for Hopper (sm_90a).
//
// Work. 64 rows of the score matrix (64 heads of one query, or as many as there are) meet the latents of a request, a block
// of 64 tokens at a time. All blocks of all requests are cut into parts (`parts.cu`); a part belongs to as many CTAs as there
// are row tiles, in clusters of two where their number is even: the two read every block together, half each.
//
// One CTA: a warp copies blocks; a warpgroup scores them (S = Q K^T) and leaves probabilities in shared memory; two more hold
// 256 channels of O each and add P V. Products of different warps take turns, and a warp cannot run ahead of its own by more
// than a few: the scores of a block are all issued before the probabilities of the one before are given out, so that the two
// warpgroups have the tensor cores while the first takes exponentials. Shared memory holds 3 of the 9 chunks of a query, the
// warpgroup's registers the others, so that there is room for two and three quarter blocks: one scored, one added, the rest
// under way. What is held passes through the ring of blocks.
//
// Bytes: 1,152 a token, once from memory for two row tiles. FLOPs: 2 * 64 * (576 + 512) per token and row tile: 2,176 cycles
// a block. Shared memory is written and read by 279 KB a block and row tile, 2,180 cycles; memory needs 2,000 for a block and
// 66 clusters. Measured on an H200, with two waits more in it: 2,810 cycles a block, the chain of the scoring warpgroup: 1,320
// until its products are issued, 160 more until they are done, 1,250 for the softmax and its stores, beside which the others'
// products take 1,240. Alone the softmax takes 675 (products use the registers' bandwidth). With a quarter of a block less room
// it was 2,910, of blocks between 2,300 and 3,860. Under steady load the card's power limit lowers its clock from 1.98 to about
// 1.6 GHz.

#include "../../cuda/registers.cuh"
#include "bf16_score.cuh"
#include "bf16_values.cuh"
#include "bf16_produce.cuh"

constexpr int PRODUCERS = 128, THREADS = GATHERERS + SCORERS + PRODUCERS;

template <int CTAS>
__device__ __forceinline__ Place own_place(const Work& work) {
  u32 rank = CTAS > 1 ? cluster_rank() : 0;
  int tiles = (work.heads + HEADS - 1) / HEADS, clusters = tiles * work.query_tokens / CTAS, cluster = blockIdx.x / CTAS;
  int tile = cluster % clusters * CTAS + rank;
  return {work.part(cluster / clusters), tile / tiles, tile % tiles * HEADS, rank};
}

// A piece's query, but for what is held.
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
  give_back<CTAS>(&shared.key_empty);
}

// Of every piece: scores, block by block, to probabilities.
template <int CTAS>
__device__ __forceinline__ void score_part(Shared& shared, const Arguments& given, const Place& place) {
  Turn turn;
  Query query;
  follow_earlier();
  fetch_query(shared, given, place, place.part.begin);
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = given.work.pieces[index];
    int left = given.work.lengths[piece.request] - piece.first * BLOCK;
    int hidden = given.work.query_tokens - 1 - place.query_index;
    Softmax state{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    float scores[32];
    take_held<CTAS>(query, shared, turn);
    wait(&shared.query_full, (index - place.part.begin) & 1);
    score(scores, shared, query, turn, false);
#pragma unroll 1
    for (int block = piece.first;; block++) {
      bool last = block + 1 == piece.last;
      // The probabilities of two blocks before have been read: asked while products are under way.
      wait(&shared.probabilities_empty[turn.count & 1], (turn.count / 2 & 1) ^ 1);
      finish_scores<CTAS>(scores, shared);
      if (last) fetch_query(shared, given, place, index + 1);
      soften(scores, state, shared, given.scale_log2, left - hidden, turn.count);
      if (left < BLOCK) clear_rest(shared, turn, left);
      left -= BLOCK;
      store_sums(shared, state, turn.count, last);
      turn.next();
      if (last) break;
      // The products of this block need not wait for a block that is still on its way.
      bool ready = __all_sync(~0u, arrived(&shared.full[turn.slot_of(0)], turn.phase_of(0)));
      if (!ready) publish(shared, turn.count - 1);
      score(scores, shared, query, turn, ready);
      if (ready) publish(shared, turn.count - 1);
    }
    publish(shared, turn.count - 1);
  }
}

// Of every piece: half of the channels.
template <int CTAS>
__device__ __forceinline__ void gather_part(Shared& shared, const Arguments& given, const Place& place, int half) {
  const Work& work = given.work;
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, rows = work.heads - place.first_head;
  Turn turn;
  follow_earlier();
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = work.pieces[index];
    float out[2][64];
    turn.skip(HELD_PAIRS);
#pragma unroll 1
    for (int block = piece.first;; block++) {
      add_block<CTAS>(out, shared, turn, half, row, block == piece.first);
      if (block + 1 == piece.last) break;
      give_back_probabilities(shared, turn);
      turn.next();
    }
    int buffer = turn.count & 1;
    float inverse[2] = {shared.inverse[buffer][row], shared.inverse[buffer][row + 8]};
    float log_sum[2] = {shared.log_sum[buffer][row], shared.log_sum[buffer][row + 8]};
    give_back_probabilities(shared, turn);
    turn.next();
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
    init_barrier(&shared.probabilities_full[buffer], SCORERS / 32);
    init_barrier(&shared.probabilities_empty[buffer], GATHERER_WARPS);
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
  if (threadIdx.x < GATHERERS) {
    take_registers<160>();
    gather_part<CTAS>(shared, given, own_place<CTAS>(given.work), __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  } else if (threadIdx.x < GATHERERS + SCORERS) {
    take_registers<160>();
    score_part<CTAS>(shared, given, own_place<CTAS>(given.work));
  } else {
    give_registers<32>();
    if (threadIdx.x < GATHERERS + SCORERS + 32) produce<CTAS>(shared, given, own_place<CTAS>(given.work));
  }
  // The other may still arrive here.
  if (CTAS > 1) {
    __syncwarp();
    cluster_meet();
  }
}

extern "C" __device__ int decode_pair_shared_bytes = sizeof(Shared), decode_single_shared_bytes = sizeof(Shared);

#define DECODE extern "C" __global__ void __launch_bounds__(THREADS, 1)

DECODE __cluster_dims__(2, 1, 1) decode_pair(const __grid_constant__ Arguments given) { attend<2>(given); }

DECODE decode_single(const __grid_constant__ Arguments given) { attend<1>(given); }
