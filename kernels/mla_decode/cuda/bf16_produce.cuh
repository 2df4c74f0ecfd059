// Copies latents into shared memory: the role of one warp.

#pragma once

#include "bf16_products.cuh"

// How many blocks ahead of the copy a block is prefetched into the second-level cache, and its index is read. Blocks prefetched
// earlier would be evicted again.
constexpr int PREFETCHED = 1, LOOKED_UP = PREFETCHED + 4;
// Blocks of a part that are prefetched before the queries are there: as many as the pieces of a few tokens have.
constexpr int FIRST_BLOCKS = 2;

// Iterates over all blocks of a part, piece by piece.
struct Walk {
  const Work& work;
  const Part& part;
  Piece piece{0, 0, 0, 0};
  int index, block = 0;

  __device__ __forceinline__ Walk(const Work& work, const Part& part) : work(work), part(part), index(part.begin) {}
  // Sets `stored` to where the pool index of the next block is stored; returns false at the end.
  __device__ __forceinline__ bool next(const int*& stored) {
    if (block == piece.last) {
      if (index == part.end) return false;
      piece = work.pieces[index++];
      block = piece.first;
    }
    stored = work.block_table + (long long)piece.request * work.table_stride + block++;
    return true;
  }
};

__device__ __forceinline__ void prefetch_query(const Arguments& given, const Place& place, int request) {
  int heads = min(given.work.heads - place.first_head, HEADS);
  prefetch_run(reinterpret_cast<const u8*>(given.query) + first_row_of(given.work, place, request) * WIDTH * 2, heads * WIDTH * 2);
}

template <int CTAS>
__device__ __forceinline__ void prefetch_block(const Arguments& given, long long block, u32 rank) {
  constexpr u32 SHARE = BLOCK * WIDTH * 2 / CTAS;
  prefetch_run(given.pool + (block * CTAS + rank) * SHARE, SHARE);
}

// One thread: copies a block. Each CTA of the cluster copies its share of it to all CTAs.
template <int CTAS>
__device__ __forceinline__ void copy_block(Shared& shared, const TensorMap& map, const RingPosition& ring, int block, u32 rank) {
  constexpr u32 ALL = (1 << CTAS) - 1;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    int slot = ring.slot_of(i), chunk = 2 * pair_at(i) + (CTAS > 1 ? rank : 0);
    u64* full = &shared.full[slot];
    u8* target = shared.latents[slot] + chunk % 2 * CHUNK_BYTES;
    wait(&shared.empty[slot], ring.phase_of(i) ^ 1);
    arrive_and_expect(full, PAIR_BYTES);
    copy_box_to<CTAS>(target, map, chunk * CHUNK * 2, block * BLOCK, full, ALL);
    if (CTAS == 1) copy_box_to<CTAS>(target + CHUNK_BYTES, map, (chunk + 1) * CHUNK * 2, block * BLOCK, full, ALL);
  }
  wait(&shared.key_empty, (ring.count & 1) ^ 1);
  arrive_and_expect(&shared.key_full, CHUNK_BYTES);
  if (ring.count % CTAS == rank) copy_box_to<CTAS>(shared.key, map, LATENT * 2, block * BLOCK, &shared.key_full, ALL);
}

// One thread: copies a query's held chunks into the ring, before the piece's first block.
__device__ __forceinline__ void copy_held(Shared& shared, const TensorMap& map, const RingPosition& ring, long long row) {
#pragma unroll
  for (int i = 0; i < HELD_PAIRS; i++) {
    int slot = ring.slot_of(i), chunk = CHUNKS - HELD_CHUNKS + 2 * i;
    wait(&shared.empty[slot], ring.phase_of(i) ^ 1);
    arrive_and_expect(&shared.full[slot], PAIR_BYTES);
    copy_box(shared.latents[slot], map, chunk * CHUNK * 2, row, &shared.full[slot]);
    copy_box(shared.latents[slot] + CHUNK_BYTES, map, (chunk + 1) * CHUNK * 2, row, &shared.full[slot]);
  }
}

template <int CTAS>
__device__ __forceinline__ void produce(Shared& shared, const Arguments& given, const Place& place) {
  int lane = threadIdx.x % 32, stored = 0, begun = 0, known = 0;
  Walk walk(given.work, place.part);
  RingPosition ring;
  for (int now = -LOOKED_UP;; now++) {
    const int* index;
    if (walk.next(index)) {
      bool begins = walk.block == walk.piece.first + 1;
      if (lane == known % 32) {
        stored = *index;
        begun = begins ? walk.piece.request : -1;
      }
      known++;
      // Only a hint, and not at the start: the previous kernel, which writes the queries, must be about to end.
      if (begins && known > 1 && now >= 0 && lane == 0) prefetch_query(given, place, walk.piece.request);
    }
    if (now < 0) continue;
    if (now == 0) {
      // Memory is idle until the queries of a few tokens are there. A block may still be written, in this cache too.
      if (CTAS == 1 && given.few && lane < min(known, FIRST_BLOCKS)) prefetch_block<CTAS>(given, stored, place.rank);
      wait_for_queries();
    }
    if (now >= known) break;
    int block = __shfl_sync(~0u, stored, now % 32);
    int request = __shfl_sync(~0u, begun, now % 32);
    if (request >= 0) {
      if (lane == 0) copy_held(shared, given.query_boxes, ring, first_row_of(given.work, place, request));
      ring.skip(HELD_PAIRS);
    }
    if (lane == 0) copy_block<CTAS>(shared, given.pool_boxes, ring, block, place.rank);
    ring.next();
    __syncwarp();
    // Not before the first block: it is needed soonest.
    int ahead = now + PREFETCHED;
    long long later = __shfl_sync(~0u, stored, ahead % 32);
    if (lane == 0 && now > 0 && ahead < known) prefetch_block<CTAS>(given, later, place.rank);
  }
}
