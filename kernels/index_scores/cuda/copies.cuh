// What CTAs of index scores have in shared memory, and the warp that copies it there.

#pragma once

#include "../../cuda/cluster.cuh"
#include "units.cuh"

// A block of the pool: its keys, then their scales. As rows of 128 bytes.
constexpr int KEY_BYTES = BLOCK * WIDTH, SCALES_BYTES = BLOCK * 4, BLOCK_BYTES = KEY_BYTES + SCALES_BYTES, BLOCK_ROWS = BLOCK_BYTES / WIDTH;

// Keys are 64 rows of 128 bytes and queries as many as heads, swizzled. HEADS: 32 or 64. STAGES: of blocks; BUFFERS: of the queries of a
// piece. READERS: warpgroups that read a block.
template <int HEADS, int STAGES, int BUFFERS, int SCORERS, int READERS>
struct Shared {
  static constexpr int HEADS_OF_QUERY = HEADS, BLOCKS = STAGES, PIECES = BUFFERS;

  u8 queries[BUFFERS][TOGETHER][HEADS * WIDTH];
  u8 keys[STAGES][KEY_BYTES];
  float scales[STAGES][BLOCK];
  float weights[BUFFERS][TOGETHER][HEADS];
  u64 query_full[BUFFERS];
  u64 query_empty[BUFFERS];
  u64 full[STAGES];
  u64 empty[STAGES];

  __device__ __forceinline__ void init_barriers() {
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
      init_barrier(&query_full[buffer], 1);
      init_barrier(&query_empty[buffer], SCORERS * 4);
    }
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], READERS * 4);
    }
    fence_barrier_init();
  }
};

// Each role calls this once.
__device__ __forceinline__ void wait_for_queries() {
  wait_for_earlier();
  start_next();
}

template <class SHARED>
__device__ __forceinline__ void copy_queries(SHARED& shared, const Arguments& given, const Piece& piece, int pieces) {
  constexpr int HEADS = SHARED::HEADS_OF_QUERY;
  int buffer = pieces % SHARED::PIECES, queries = piece.queries(given);
  long long first = piece.query(given);
  wait(&shared.query_empty[buffer], (pieces / SHARED::PIECES & 1) ^ 1);
  arrive_and_expect(&shared.query_full[buffer], queries * HEADS * (WIDTH + 4));
  for (int i = 0; i < queries; i++) {
    copy_box(shared.queries[buffer][i], given.query_boxes, 0, (first + i) * HEADS, &shared.query_full[buffer]);
    copy_run(shared.weights[buffer][i], given.weights + (first + i) * HEADS, HEADS * 4, &shared.query_full[buffer]);
  }
}

template <class SHARED>
__device__ __forceinline__ void copy_block(SHARED& shared, const Arguments& given, int unit, int block) {
  int stage = unit % SHARED::BLOCKS;
  wait(&shared.empty[stage], (unit / SHARED::BLOCKS & 1) ^ 1);
  arrive_and_expect(&shared.full[stage], BLOCK_BYTES);
  copy_box(shared.keys[stage], given.pool_boxes, 0, block * BLOCK_ROWS, &shared.full[stage]);
  copy_run(shared.scales[stage], given.pool + (long long)block * BLOCK_BYTES + KEY_BYTES, SCALES_BYTES, &shared.full[stage]);
}

// One warp: copies the queries and blocks of all pieces. A lane looks up every 32nd block, 32 of them ahead. The plan and the keys
// are older than the previous kernel, which makes queries: the first blocks are copied before it has ended.
template <class SHARED>
__device__ __forceinline__ void produce(SHARED& shared, const Arguments& given) {
  int lane = threadIdx.x % 32, unit = 0, pieces = 0, ahead = 0;
  Walk walk(given);
  Piece piece;
  while (walk.next(piece)) {
    const int* stored = given.block_table + (long long)piece.row * given.table_stride;
    int next = stored[min(piece.first + lane, piece.last - 1)];
    if (!pieces) {
      for (; ahead < min(piece.last - piece.first, SHARED::BLOCKS); ahead++) {
        int block = __shfl_sync(~0u, next, ahead);
        if (lane == 0) copy_block(shared, given, ahead, block);
      }
      wait_for_queries();
    }
    if (lane == 0) copy_queries(shared, given, piece, pieces);
    pieces++;
    for (int first = piece.first; first < piece.last; first += 32) {
      int own = next;
      next = stored[min(first + 32 + lane, piece.last - 1)];
      for (int i = 0; i < min(piece.last - first, 32); i++, unit++) {
        int block = __shfl_sync(~0u, own, i);
        if (lane == 0 && unit >= ahead) copy_block(shared, given, unit, block);
      }
      __syncwarp();
    }
  }
}
