// The roles of scoring and adding values over all pieces of a part, whoever copies latents.

#pragma once

#include "fp8_score.cuh"
#include "fp8_values.cuh"

// Registers of a thread, by role: 65,536 in all. A value thread needs 128 for its sums and 32 for those of the tensor cores.
constexpr int VALUE_REGISTERS = 184, SCORE_REGISTERS = 112, PRODUCER_REGISTERS = 32;

// The scoring warpgroup: for every piece of the part, scores to probabilities, block by block.
// GATHERED: threads of this CTA copy latents into shared memory, whose writes the tensor cores see only after a fence.
template <int CTAS, bool GATHERED = false>
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
    if (GATHERED) fence_async_proxy();
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
      if (GATHERED) fence_async_proxy();
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

// copying: how many threads arrive for what they have copied.
template <int CTAS>
__device__ __forceinline__ void init_barriers(Shared& shared, int copying = 1) {
  if (threadIdx.x) return;
  for (int parity = 0; parity < 2; parity++) init_barrier(&shared.scored[parity], SCORE_THREADS / 32);
  for (int stage = 0; stage < STAGES; stage++) {
    init_barrier(&shared.probabilities_full[stage], SCORE_THREADS / 32);
    init_barrier(&shared.full[stage], copying);
    init_barrier(&shared.empty[stage], 2 * CTAS);
  }
  fence_barrier_init();
}
