// Scores as integers of the same order, and what a choice counts.

#pragma once

#include "../../cuda/hopper.cuh"

// The bits of a pass's bins, from the highest, and what stands where a query sees fewer tokens than are wanted.
constexpr int PASSES = 3, BINS = 2048, NO_TOKEN = -1;

struct Arguments {
  // [queries, width]
  const float* scores;
  const int* seen;
  // [queries, count]
  int* out;
  int width, count;
};

// How many scores are above the least chosen one, and equal to it.
struct alignas(8) Counts {
  int above, equal;
};

// Both zeros are equal. No score becomes zero.
__device__ __forceinline__ u32 ordered(float score) {
  u32 bits = score == 0.0f ? 0u : __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
