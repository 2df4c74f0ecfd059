// A thread's two rows of a tile: which keys they see, and where their results go.

#pragma once

#include "../../cuda/quads.cuh"

// A head's keys are its own channels, followed by those that all heads share. DeepSeek-V3's widths, unless the source that
// includes this has said otherwise.
#ifndef OWN_CHANNELS
#define OWN_CHANNELS 128
#define VALUE_CHANNELS 128
#endif
constexpr int QUERIES = 128, OWN = OWN_CHANNELS, ROPE = 64, WIDTH = OWN + ROPE, VALUE = VALUE_CHANNELS;
// Each of the two warpgroups that compute has half of a tile's queries.
constexpr int WARPGROUP = 128, CONSUMERS = 2, HALF_QUERIES = QUERIES / CONSUMERS;

// Which keys a thread's two rows and its warpgroup's rows see.
struct Sight {
  // The last key that each of the thread's rows sees.
  int last[2];
  // All of the warpgroup's rows see this many keys.
  int all;

  // row: the first of the thread's rows; its second is 8 rows further.
  template <class Unit>
  __device__ __forceinline__ Sight(const Unit& unit, int half, int row) {
    all = unit.seen_by(half * HALF_QUERIES);
    last[0] = unit.seen_by(row) - 1;
    last[1] = unit.seen_by(row + 8) - 1;
  }
};

// What a row's sums are multiplied by: the inverse of the softmax's denominator. A query that sees no key has zeros.
template <class Softmax>
__device__ __forceinline__ float inverse_total(const Softmax& softmax, int side) {
  return softmax.total[side] > 0 ? __fdividef(1.0f, softmax.total[side]) : 0.0f;
}

// Stores a tile's rows in bf16.
template <class Inputs, class Softmax, class Unit>
__device__ __forceinline__ void store_rows(const Inputs& given, const float (&out)[VALUE / 2], const Softmax& softmax, const Unit& unit, int row) {
  int thread = threadIdx.x % 4;
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int own = row + side * 8;
    bool known = own < unit.queries;
    long long query = unit.first_query + own;
    float inverse = inverse_total(softmax, side);
    u8* target = given.out + query * given.out_row + (unit.head * VALUE + thread * 8) * 2;
#pragma unroll
    for (int group = 0; group < VALUE / 32; group++) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int at = (group * 4 + i) * 4 + side * 2;
        words[i] = pack_bf16(out[at] * inverse, out[at + 1] * inverse);
      }
      uint4 values = exchange(words);
      if (known) *reinterpret_cast<uint4*>(target + group * 64) = values;
    }
  }
}

// Stores a tile's rows in e4m3, and their scales: groups of 128 of a head's values, of which it must have whole ones.
template <class Inputs, class Softmax, class Unit>
__device__ __forceinline__ void store_quantized(const Inputs& given, const float (&out)[VALUE / 2], const Softmax& softmax, const Unit& unit, int row) {
  constexpr int GROUPS = VALUE / 128;
  int thread = threadIdx.x % 4;
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int own = row + side * 8;
    bool known = own < unit.queries;
    long long query = unit.first_query + own;
    float inverse = inverse_total(softmax, side), values[32];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
#pragma unroll
      for (int i = 0; i < 32; i++) values[i] = out[group * 64 + i / 2 * 4 + side * 2 + i % 2] * inverse;
      float scale = scale_of_quad(values);
      uint4 packed[2];
      quantize_quad(packed, values, scale);
      uint4* target = reinterpret_cast<uint4*>(given.out + query * given.out_row + unit.head * VALUE + group * 128 + thread * 32);
      if (known) target[0] = packed[0], target[1] = packed[1];
      if (known && thread == 0) given.of_rows[(long long)(unit.head * GROUPS + group) * given.row_stride + query] = scale;
    }
  }
}

// The index-th head and tile: heads in groups, and in each group the tiles with most keys first. Tile -1: there are no more.
template <class Inputs>
__device__ __forceinline__ int2 head_and_tile(const Inputs& given, int index) {
  int together = given.heads_together * given.tile_count, first_head = index / together * given.heads_together;
  int heads = min(given.heads_together, given.heads - first_head), at = index % together;
  // True also where the last group has fewer heads.
  if (first_head >= given.heads || at >= heads * given.tile_count) return {0, -1};
  return {first_head + at % heads, at / heads};
}

// Called once by each CTA, with the index for which there is no unit. A number is taken for every unit that is
// computed: the CTA that took the last of them leaves zero for the next launch.
template <typename Inputs>
__device__ __forceinline__ void end_taking(const Inputs& given, int index) {
  if (index == gridDim.x + given.heads * given.tile_count - 1) *given.taken = 0;
}
