// Copies queries and latents into shared memory: the role of one warpgroup.

#pragma once

#include "fp8_arguments.cuh"

__device__ __forceinline__ void producers_meet() { asm volatile("bar.sync 3, 128;" ::: "memory"); }

// Copies the first `tokens` tokens of a request's last block and clears the rest, whose probabilities are zero.
__device__ __forceinline__ void copy_part(u8* tile, const u8* source, int tokens) {
  u32 base = shared_address(tile);
#pragma unroll 3
  for (int i = 0; i < TILE_BYTES / 16 / PRODUCERS; i++) {
    int piece = i * PRODUCERS + threadIdx.x % PRODUCERS, token = piece / (WIDTH / 16), column = piece % (WIDTH / 16);
    u32 latent = (column / 8) * CHUNK_BYTES + token * 128 + ((column % 8) ^ (token & 7)) * 16;
    u32 rope = ROPE_OFFSET + token * 64 + ((column % 4) ^ ((token >> 1) & 3)) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(base + (column < LATENT / 16 ? latent : rope)),
                 "l"(source + piece * 16), "r"(token < tokens ? 16 : 0) : "memory");
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async_proxy();
}

// One thread: copies a block. Each CTA of the cluster copies its share of it to all CTAs.
template <int CTAS>
__device__ __forceinline__ void copy_whole(Shared& shared, const Arguments& given, const Ring& ring, int block, u32 rank) {
  constexpr u32 ALL = (1 << CTAS) - 1;
  u8* tile = shared.tiles[ring.stage];
  u64* full = &shared.full[ring.stage];
  arrive_and_expect(full, TILE_BYTES);
#pragma unroll
  for (int i = 0; i < LATENT / 128 / CTAS; i++) {
    int chunk = i * CTAS + (CTAS > 1 ? rank : 0);
    copy_box_to<CTAS>(tile + chunk * CHUNK_BYTES, given.latents, chunk * 128, block * BLOCK, full, ALL);
  }
  if (ring.count % CTAS == rank) copy_box_to<CTAS>(tile + ROPE_OFFSET, given.keys, LATENT, block * BLOCK, full, ALL);
}

// One thread: copies a piece's queries into two stages, before its first block.
__device__ __forceinline__ void copy_queries(Shared& shared, const Arguments& given, Ring ring, int request) {
  long long first = ((long long)request * given.work.query_tokens + shared.place.query_index) * given.work.heads + shared.place.first_head;
#pragma unroll
  for (int half = 0; half < 2; half++, ring.advance()) {
    u64* full = &shared.full[ring.stage];
    wait(&shared.empty[ring.stage], ring.phase ^ 1);
    arrive_and_expect(full, TILE_BYTES);
#pragma unroll 1
    for (int box = 0; box < QUERY_BOXES / 2; box++)
      copy_box(shared.tiles[ring.stage] + box * BOX_BYTES, given.queries, (half * QUERY_BOXES / 2 + box) * BOX_CHANNELS * 2, first, full);
  }
}

template <int CTAS>
__device__ __forceinline__ void produce(Shared& shared, const Arguments& given) {
  const Place& place = shared.place;
  bool first = threadIdx.x % PRODUCERS == 0;
  Ring ring;
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = given.work.pieces[index];
    int length = given.work.lengths[piece.request];
    const int* blocks = given.work.block_table + (long long)piece.request * given.work.table_stride;
    int next = blocks[piece.first];
    if (index == place.part.begin) wait_for_queries();
    if (first) copy_queries(shared, given, ring, piece.request);
    ring.advance();
    ring.advance();
    for (int block = piece.first; block < piece.last; block++, ring.next()) {
      int tokens = length - block * BLOCK, stored = next;
      if (block + 1 < piece.last) next = blocks[block + 1];
      if (first) wait(&shared.empty[ring.stage], ring.phase ^ 1);
      if (tokens >= BLOCK) {
        if (first) copy_whole<CTAS>(shared, given, ring, stored, place.rank);
        continue;
      }
      producers_meet();
      copy_part(shared.tiles[ring.stage], given.pool + (long long)stored * TILE_BYTES, tokens);
      producers_meet();
      if (first) arrive(&shared.full[ring.stage]);
    }
  }
}
