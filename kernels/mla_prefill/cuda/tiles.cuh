// What a CTA computes at a time, and the layout of shared memory.

#pragma once

#include "rows.cuh"

// A step attends to two blocks of keys. They may lie anywhere, in falling order. Wide heads leave room for fewer keys.
#ifndef STEP_KEYS
#define STEP_KEYS 128
#endif
constexpr int KEYS = STEP_KEYS, BLOCK = KEYS / 2;
// Whether bits say which keys each query sees: then the last of them hide what comes after a query, too.
#ifndef MASKED_KEYS
#define MASKED_KEYS false
#endif
constexpr bool MASKED = MASKED_KEYS;
// Sums and scores of a thread, which has parts of two rows.
constexpr int SUMS = VALUE / 2, SCORES = KEYS / 2;
// Channels of a box: rows of 128 bytes, swizzled.
constexpr int CHUNK = 64, KEY_CHUNKS = WIDTH / CHUNK, OWN_CHUNKS = OWN / CHUNK, VALUE_CHUNKS = VALUE / CHUNK;
constexpr int QUERY_CHUNK_BYTES = HALF_QUERIES * CHUNK * 2, CHUNK_BYTES = KEYS * CHUNK * 2;
constexpr int QUERY_BYTES = KEY_CHUNKS * QUERY_CHUNK_BYTES, KEY_BYTES = KEY_CHUNKS * CHUNK_BYTES, VALUE_BYTES = VALUE_CHUNKS * CHUNK_BYTES;
// Keys of which a mask has the bits of all queries together, and the bytes of them that a step copies.
constexpr int MASK_KEYS = 128, MASK_BYTES = MASKED ? QUERIES * MASK_KEYS / 8 : 0;
constexpr int STAGES = 2;
// The place of a block that does not exist: after all keys.
constexpr int NO_BLOCK = 1 << 29;

// A tile: up to 128 queries of a prompt, of one head.
struct Unit {
  // The first query among the queries of all prompts, and how many there are. 0: there are no more units.
  int first_query, queries, head;
  // The prompt's keys up to the last that the tile attends to, and how many keys the last query sees: it may see more of them
  // than there are, or, before all of them, none.
  int keys, seen;
  // 0: all of the tile's queries see no key.
  int steps;
  // Where the blocks of the first two steps begin among the prompt's keys. All queries see all keys of the later steps.
  int blocks[4];

  __device__ __forceinline__ int seen_by(int row) const { return min(seen - queries + 1 + row, keys); }
};

// The inputs of all kernels.
struct Inputs {
  // Boxes of 64 queries, and of both parts of some keys and of values, 64 channels of each.
  TensorMap query_boxes, own_boxes, shared_boxes, value_boxes;
  // Units taken by CTAs beyond their first one. Zero before and after the launch.
  int* taken;
  // [total_queries, heads, VALUE], rows out_row bytes apart.
  u8* out;
  // [heads, row_stride]: the scales of outputs that are quantized; the log-sums of others, or null if they are not wanted.
  float* of_rows;
  int tile_count, heads, total_queries;
  // Tiles of this many heads are taken together: their keys and values fit in the second-level cache.
  int heads_together;
  // Bytes from one head to the next.
  int query_head, own_head, value_head;
  int row_stride, out_row;
  float scale_log2;
};

// A query's bits of a step.
template <int KEYS>
struct alignas(KEYS / 8) MaskWords { u32 word[KEYS / 32]; };

// Room for the bits that a step copies, a row for each query of the tile.
template <bool MASKED>
struct Masks {};
template <>
struct Masks<true> { uint4 mask[STAGES][QUERIES]; };

struct Shared : Masks<MASKED> {
  u8 query[CONSUMERS][QUERY_BYTES];
  u8 key[STAGES][KEY_BYTES];
  u8 value[STAGES][VALUE_BYTES];
  // What the queries in `query` belong to. The producer writes it before it copies them.
  Unit unit[CONSUMERS];
  u64 query_full[CONSUMERS], query_empty[CONSUMERS];
  u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
};
