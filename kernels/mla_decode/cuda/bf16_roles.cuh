// The roles of scoring and adding values over all pieces of a part, whoever copies latents.

#pragma once

#include "bf16_score.cuh"
#include "bf16_values.cuh"

constexpr int PRODUCERS = 128, THREADS = VALUE_THREADS + SCORE_THREADS + PRODUCERS;

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
// GATHERED: threads of this CTA copy latents into shared memory, rather than the copy engine.
template <int CTAS, bool GATHERED = false>
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
    score<GATHERED>(scores, shared, query, ring, false);
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
      score<GATHERED>(scores, shared, query, ring, ready);
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

// copying: how many threads arrive for what they have copied.
template <int CTAS>
__device__ __forceinline__ void init_barriers(Shared& shared, int copying = 1) {
  if (threadIdx.x) return;
  init_barrier(&shared.query_full, 1);
  init_barrier(&shared.key_full, copying);
  init_barrier(&shared.key_empty, CTAS);
  for (int buffer = 0; buffer < 2; buffer++) {
    init_barrier(&shared.probabilities_full[buffer], SCORE_THREADS / 32);
    init_barrier(&shared.probabilities_empty[buffer], VALUE_WARPS);
  }
  for (int slot = 0; slot < SLOTS; slot++) {
    init_barrier(&shared.full[slot], copying);
    init_barrier(&shared.empty[slot], CTAS);
  }
  fence_barrier_init();
}
