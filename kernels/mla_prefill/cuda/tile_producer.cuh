// Copies a tile's queries, keys and values after one another: the producer of attention over whole prompts.

#pragma once

#include "attend.cuh"

// Up to 128 queries of a prompt.
struct Tile {
  // The first query among the queries of all prompts, and how many there are.
  int first_query, queries;
  // The prompt's first key among the keys of all prompts, and how many of its keys the tile's last query sees.
  int first_key, keys;
};

// Arguments: with `inputs` and `tiles`, those with most keys first; a kernel with masks also has `mask` and `mask_rows`.
template <class Arguments>
struct TileProducer : Copier {
  const Arguments& all;

  // Returns the row of the unit's last step.
  __device__ __forceinline__ int take(Unit& unit, int index) const {
    int2 place = head_and_tile(given, index);
    if (place.y < 0) {
      unit.queries = unit.steps = 0;
      return 0;
    }
    const int4 tile = *reinterpret_cast<const int4*>(all.tiles + place.y);
    unit = {tile.x, tile.y, place.x, tile.w, tile.w, (tile.w + KEYS - 1) / KEYS};
    int last = (unit.steps - 1) * KEYS;
    unit.blocks[0] = last, unit.blocks[1] = last + BLOCK;
    unit.blocks[2] = last - KEYS, unit.blocks[3] = last - BLOCK;
    return tile.z + last;
  }

  // The keys of a step, the `step`-th of the prompt, and which of them the tile's queries see, if a mask says so.
  __device__ __forceinline__ void copy_step(const Unit& unit, int row, int step) {
    int stage = keys % STAGES;
    copy_keys(unit.head, {row});
    if constexpr (MASKED) copy_mask(shared, unit, step, stage);
  }
  template <class Room>
  __device__ __forceinline__ void copy_mask(Room& room, const Unit& unit, int step, int stage) {
    const uint4* bits = all.mask + (long long)(step * KEYS / MASK_KEYS) * all.mask_rows + unit.first_query;
    copy_run(room.mask[stage], bits, MASK_BYTES, &room.key_full[stage]);
  }

  // The next unit is taken while this one is computed.
  __device__ __forceinline__ void run() {
    int index = blockIdx.x;
    while (true) {
      Unit unit;
      int row = take(unit, index);
      copy_queries(unit);
      if (!unit.queries) return end_taking(given, index);
      copy_step(unit, row, unit.steps - 1);
#pragma unroll 1
      for (int left = unit.steps; left > 0; left--, row -= KEYS) {
        if (left > 1) copy_step(unit, row - KEYS, left - 2);
        copy_values(unit.head, {row});
        if (left == unit.steps) index = gridDim.x + atomicAdd(given.taken, 1);
      }
    }
  }
};
