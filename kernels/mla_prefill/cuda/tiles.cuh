// Which tiles a CTA computes, and the layout of shared memory.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int QUERIES = 128, KEYS = 128, WIDTH = 192, VALUE = 128;
// Each of the two warpgroups that compute has half of a tile's queries.
constexpr int WARPGROUP = 128, CONSUMERS = 2, HALF_QUERIES = QUERIES / CONSUMERS;
// Channels of a box: rows of 128 bytes, swizzled.
constexpr int CHUNK = 64, KEY_CHUNKS = WIDTH / CHUNK, VALUE_CHUNKS = VALUE / CHUNK;
constexpr int QUERY_CHUNK_BYTES = HALF_QUERIES * CHUNK * 2, CHUNK_BYTES = KEYS * CHUNK * 2;
constexpr int QUERY_BYTES = KEY_CHUNKS * QUERY_CHUNK_BYTES, KEY_BYTES = KEY_CHUNKS * CHUNK_BYTES, VALUE_BYTES = VALUE_CHUNKS * CHUNK_BYTES;
constexpr int STAGES = 2;

// Up to 128 queries of a prompt.
struct Tile {
  // The first query among the queries of all prompts, and how many there are. 0: there are no more tiles.
  int first_query, queries;
  // The prompt's first key among the keys of all prompts, and how many of its keys the tile's last query sees.
  int first_key, keys;
};

struct Arguments {
  // Boxes of 64 queries, 128 keys and 128 values, 64 channels of each.
  TensorMap query_boxes, key_boxes, value_boxes;
  // Those with most keys first.
  const Tile* tiles;
  // Tiles taken by CTAs beyond their first one. Zero at the launch.
  int* taken;
  // [total_queries, heads, VALUE].
  u8* out;
  // [heads, total_queries].
  float* log_sums;
  int tile_count, heads, total_queries;
  // Tiles of this many heads are taken together: their keys and values fit in the second-level cache.
  int heads_together;
  // Whether a query sees one key less than the next query does. If not, all queries of a tile see all of its keys.
  int causal;
  // Bytes from one head to the next.
  int query_head, key_head, value_head;
  float scale_log2;
};

struct Shared {
  u8 query[CONSUMERS][QUERY_BYTES];
  u8 key[STAGES][KEY_BYTES];
  u8 value[STAGES][VALUE_BYTES];
  // What the queries in `query` belong to. The producer writes it before it copies them.
  Tile tile[CONSUMERS];
  int head[CONSUMERS];
  u64 query_full[CONSUMERS], query_empty[CONSUMERS];
  u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
};

__device__ __forceinline__ int blocks_of(const Tile& tile) { return (tile.keys + KEYS - 1) / KEYS; }

// A tile of one head.
struct Unit {
  Tile tile;
  int head;
};

// The index-th unit: heads in groups, and in each group the tiles with most keys first.
__device__ __forceinline__ Unit unit_at(const Arguments& given, int index) {
  int together = given.heads_together * given.tile_count, first_head = index / together * given.heads_together;
  int heads = min(given.heads_together, given.heads - first_head), at = index % together;
  // Also where the last group has fewer heads.
  if (first_head >= given.heads || at >= heads * given.tile_count) return {{0, 0, 0, 0}, 0};
  const int4 found = *reinterpret_cast<const int4*>(given.tiles + at / heads);
  return {{found.x, found.y, found.z, found.w}, first_head + at % heads};
}
