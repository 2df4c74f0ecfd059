// Attention of one prompt of bf16 over kept blocks of keys, for Hopper (sm_90a): keys 192 wide, values 128.
//
// A tile is 128 queries of one head against the blocks of 64 keys in its list, two at a time: the consumers are those of dense
// attention. Later tiles, which tend to have more blocks, come first.

#include "../../mla_prefill/cuda/attend.cuh"

struct Arguments {
  Inputs inputs;
  // [heads, tiles, blocks]: the kept blocks in falling order, then anything.
  const short* lists;
  // [heads, tiles, 2]: how many of them not all queries see whole, which come first, and how many there are.
  const int* counts;
  // first_query: how many of the keys lie before the first query.
  int blocks, total_keys, first_query;
};

struct Producer : Copier {
  const Arguments& all;

  __device__ __forceinline__ static int first_key(const short* block) { return *block * BLOCK; }

  // Returns the unit's list. If the number of blocks is odd, the first one is alone in its step.
  __device__ __forceinline__ const short* take(Unit& unit, int index) const {
    int2 place = head_and_tile(given, index);
    unit.queries = unit.steps = 0;
    if (place.y < 0) return nullptr;
    int tile = given.tile_count - 1 - place.y;
    long long at = (long long)place.x * given.tile_count + tile;
    int count = all.counts[at * 2 + 1], first = tile * QUERIES, queries = min(given.total_queries - first, QUERIES);
    const short* list = all.lists + at * all.blocks;
    int seen = all.first_query + first + queries;
    unit = {first, queries, place.x, min(seen, all.total_keys), seen, (count + 1) / 2};
    bool odd = count & 1;
    unit.blocks[0] = count ? first_key(list) : NO_BLOCK;
    unit.blocks[1] = count && !odd ? first_key(list + 1) : NO_BLOCK;
    list += odd ? 1 : 2;
    unit.blocks[2] = count > 2 ? first_key(list) : NO_BLOCK;
    unit.blocks[3] = count > 2 ? first_key(list + 1) : NO_BLOCK;
    return list;
  }

  // Lists are read a step ahead. The next unit is taken while this one is computed.
  __device__ __forceinline__ void run() {
    int index = blockIdx.x;
    while (true) {
      Unit unit;
      const short* list = take(unit, index);
      copy_queries(unit);
      if (!unit.queries) return end_taking(given, index);
      int head = unit.head, left = unit.steps;
      int now[2] = {unit.blocks[0], unit.blocks[1]}, next[2] = {unit.blocks[2], unit.blocks[3]};
      index = gridDim.x + atomicAdd(given.taken, 1);
      if (left) copy_keys(head, now);
#pragma unroll 1
      for (; left > 0; left--) {
        list += 2;
        int after[2];
        if (left > 2) after[0] = first_key(list), after[1] = first_key(list + 1);
        if (left > 1) copy_keys(head, next);
        copy_values(head, now);
        now[0] = next[0], now[1] = next[1], next[0] = after[0], next[1] = after[1];
      }
    }
  }
};

#define ATTEND(NAME, QUANTIZES)                                                                            \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared);                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Arguments given) { \
    attend<Producer, QUANTIZES>(given);                                                                    \
  }

ATTEND(attend_blocks, false)
ATTEND(attend_blocks_and_quantize, true)
