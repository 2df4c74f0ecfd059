// Scores as integers of the same order, and what a choice counts and sums.

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
  // Queries that see no more tokens are another kernel's; none are if it is 0.
  int few;
  // Whether clusters take turns, so that no more of their CTAs choose than have work.
  int turns;
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

// All threads of a block: the sum of `own` over the threads before this one. warp_sums: one for each warp.
__device__ __forceinline__ int sum_before(int* warp_sums, int own) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  sum += __reduce_add_sync(~0u, lane < warp ? warp_sums[lane] : 0) - own;
  return sum;
}
