// What a CTA computes at a time, and the layout of shared memory.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int QUERIES = 128, KEYS = 128, WIDTH = 192, VALUE = 128;
// Each of the two warpgroups that compute has half of a tile's queries.
constexpr int WARPGROUP = 128, CONSUMERS = 2, HALF_QUERIES = QUERIES / CONSUMERS;
// A step attends to two blocks of keys. They may lie anywhere, in falling order.
constexpr int BLOCK = KEYS / 2;
// Channels of a box: rows of 128 bytes, swizzled.
constexpr int CHUNK = 64, KEY_CHUNKS = WIDTH / CHUNK, VALUE_CHUNKS = VALUE / CHUNK;
constexpr int QUERY_CHUNK_BYTES = HALF_QUERIES * CHUNK * 2, CHUNK_BYTES = KEYS * CHUNK * 2;
constexpr int QUERY_BYTES = KEY_CHUNKS * QUERY_CHUNK_BYTES, KEY_BYTES = KEY_CHUNKS * CHUNK_BYTES, VALUE_BYTES = VALUE_CHUNKS * CHUNK_BYTES;
constexpr int STAGES = 2;
// The place of a block that is not there: behind all keys.
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
};

// What all kernels are given.
struct Inputs {
  // Boxes of 64 queries, and of some keys and values, 64 channels of each.
  TensorMap query_boxes, key_boxes, value_boxes;
  // Units taken by CTAs beyond their first one. Zero at the launch.
  int* taken;
  // [total_queries, heads, VALUE].
  u8* out;
  // [heads, total_queries].
  float* log_sums;
  int tile_count, heads, total_queries;
  // Tiles of this many heads are taken together: their keys and values fit in the second-level cache.
  int heads_together;
  // Bytes from one head to the next.
  int query_head, key_head, value_head;
  float scale_log2;
};

struct Shared {
  u8 query[CONSUMERS][QUERY_BYTES];
  u8 key[STAGES][KEY_BYTES];
  u8 value[STAGES][VALUE_BYTES];
  // What the queries in `query` belong to. The producer writes it before it copies them.
  Unit unit[CONSUMERS];
  u64 query_full[CONSUMERS], query_empty[CONSUMERS];
  u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
};

// The index-th head and tile: heads in groups, and in each group the tiles with most keys first. Tile -1: there are no more.
__device__ __forceinline__ int2 head_and_tile(const Inputs& given, int index) {
  int together = given.heads_together * given.tile_count, first_head = index / together * given.heads_together;
  int heads = min(given.heads_together, given.heads - first_head), at = index % together;
  // Also where the last group has fewer heads.
  if (first_head >= given.heads || at >= heads * given.tile_count) return {0, -1};
  return {first_head + at % heads, at / heads};
}
