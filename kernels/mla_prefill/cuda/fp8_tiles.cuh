// What a CTA computes at a time in FP8, and the layout of shared memory.

#pragma once

#include "rows.cuh"

// Keys of a step, which is a block: its keys have one scale, and so have its values.
constexpr int KEYS = 160;
// Queries are in bf16: boxes of 64 channels, rows of 128 bytes, swizzled.
constexpr int CHUNK = 64, QUERY_CHUNKS = WIDTH / CHUNK;
constexpr int QUERY_CHUNK_BYTES = HALF_QUERIES * CHUNK * 2, QUERY_BYTES = QUERY_CHUNKS * QUERY_CHUNK_BYTES;
// Keys and values: the first 128 bytes of all rows, then the other 64 or 32 of all rows; both swizzled.
constexpr int KEY_BYTES = KEYS * WIDTH, VALUE_BYTES = KEYS * VALUE;
constexpr int KEY_REST = KEYS * 128, VALUE_REST = VALUE * 128;
constexpr int STAGES = 2;
// The tensor cores add up the products of this many steps, since they keep too few bits of a long sum.
constexpr int SUMMED_STEPS = 4;

// A tile: up to 128 queries of a prompt, of one head.
struct Unit {
  // The first query among the queries of all prompts, and how many there are. 0: there are no more units.
  int first_query, queries, head;
  // How many of the prompt's keys the last query sees.
  int seen;
  int steps;

  // Rows after the last query see as many keys as it does.
  __device__ __forceinline__ int seen_by(int row) const { return min(seen - queries + 1 + row, seen); }
};

// A head's block: a key is `key` times what is stored. The values' scale comes as its logarithm to base 2, and inverted.
struct Scales {
  float key, value_log2, value_inverse, unused;
};

struct Tile {
  // The first query among the queries of all prompts, and how many there are.
  int first_query, queries;
  // The prompt's first block among the blocks of all prompts, and how many of its keys the tile's last query sees.
  int first_block, keys;
};

struct Arguments {
  // Boxes of 64 queries, 64 channels of each.
  TensorMap query_boxes;
  // [heads, blocks] blocks as they lie in shared memory: `fp8_quantize.cu` writes them.
  const u8 *keys, *values;
  const Scales* scales;
  // The tiles, those with most keys first.
  const Tile* tiles;
  // Units taken by CTAs beyond their first one. Zero before and after the launch.
  int* taken;
  // [queries, heads, VALUE], rows out_row bytes apart.
  u8* out;
  // [heads, row_stride]: the scales of outputs that are quantized.
  float* of_rows;
  int tile_count, heads, row_stride, out_row, blocks;
  // Tiles of this many heads are taken together: their keys and values fit in the second-level cache.
  int heads_together;
  // Bytes from one head of the queries to the next.
  int query_head;
  float scale_log2;
};

struct Shared {
  u8 query[CONSUMERS][QUERY_BYTES];
  u8 key[STAGES][KEY_BYTES];
  u8 value[STAGES][VALUE_BYTES];
  // Each thread's earlier sums: `Earlier`.
  float4 earlier[CONSUMERS][VALUE / 8][WARPGROUP];
  // One in e4m3: 8 rows of 32.
  alignas(256) u8 ones[8 * 32];
  // The scales of the blocks in `key`.
  Scales scales[STAGES];
  // What the queries in `query` belong to. The producer writes it before it copies them.
  Unit unit[CONSUMERS];
  u64 query_full[CONSUMERS], query_empty[CONSUMERS];
  u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
};
