// Attention over ragged prompts of bf16, for Hopper (sm_90a): keys 192 wide, values 128, or as the source that
// includes this says.
//
// A tile is 128 queries of one head of a prompt against all keys that they see, 128 at a time. Tiles with most keys come first.
// A prompt's last keys come first: the diagonal is masked before the loop, and CTAs with different tiles of a head read
// different blocks at a time. In the other direction they all read the same blocks at once, which takes 7 to 15% longer.
// `notes.md` has what was tried.

#include "attend.cuh"

// Up to 128 queries of a prompt.
struct Tile {
  // The first query among the queries of all prompts, and how many there are.
  int first_query, queries;
  // The prompt's first key among the keys of all prompts, and how many of its keys the tile's last query sees.
  int first_key, keys;
};

struct Arguments {
  Inputs inputs;
  // The tiles, those with most keys first.
  const Tile* tiles;
};

struct Producer : Copier {
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

  // The next unit is taken while this one is computed.
  __device__ __forceinline__ void run() {
    int index = blockIdx.x;
    while (true) {
      Unit unit;
      int row = take(unit, index);
      copy_queries(unit);
      if (!unit.queries) return end_taking(given, index);
      copy_keys(unit.head, {row});
#pragma unroll 1
      for (int left = unit.steps; left > 0; left--, row -= KEYS) {
        if (left > 1) copy_keys(unit.head, {row - KEYS});
        copy_values(unit.head, {row});
        if (left == unit.steps) index = gridDim.x + atomicAdd(given.taken, 1);
      }
    }
  }
};

#define ATTEND(NAME, QUANTIZES)                                                                            \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared);                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Arguments given) { \
    attend<Producer, QUANTIZES>(given);                                                                    \
  }

ATTEND(attend_prompts, false)
#if VALUE_CHANNELS % 128 == 0
ATTEND(attend_prompts_and_quantize, true)
#endif
