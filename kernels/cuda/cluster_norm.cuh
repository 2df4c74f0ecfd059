// Residual addition and RMSNorm of a row by a cluster of CTAs, of which a thread has eight values.

#pragma once

#include "cluster.cuh"
#include "values.cuh"

constexpr int MOST_WARPS = 32, MOST_CTAS = 8;

// Sums over a cluster of CTAs, always in the same order.
struct ClusterSum {
  float of_warps[MOST_WARPS], of_ctas[MOST_CTAS];
  u64 full;

  __device__ __forceinline__ void prepare() {
    if (threadIdx.x == 0) {
      init_barrier(&full, 1);
      fence_barrier_init();
      arrive_and_expect(&full, cluster_size() * 4);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }

  __device__ __forceinline__ float sum(float value) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32, ranks = cluster_size();
    value = of_warp(value);
    if (lane == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    cluster_wait();
    if (threadIdx.x < 32) {
      value = of_warp(lane < warps ? of_warps[lane] : 0.0f);
      if (lane < ranks) send(&of_ctas[cluster_rank()], value, &full, lane);
    }
    wait(&full, 0);
    float total = 0.0f;
    for (int i = 0; i < ranks; i++) total += of_ctas[i];
    return total;
  }

  __device__ __forceinline__ static float of_warp(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }
};

// Stores delta + residual, rounded to bf16, and returns that normalized and times the weight. had: the residual so far;
// width: of the row, in values. Rounds the result twice, as the reference does: after normalizing and after
// multiplying.
__device__ __forceinline__ uint4 add_and_normalize(ClusterSum& cluster, Values delta, uint4 had, uint4* residual, uint4 weight,
                                                   int width, float epsilon) {
  delta.add(Values::of(had), 1.0f);
  uint4 rounded = delta.packed();
  *residual = rounded;
  Values sum = Values::of(rounded), factors = Values::of(weight);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; i++) square = fmaf(sum.value[i], sum.value[i], square);
  float scale = rsqrtf(cluster.sum(square) / width + epsilon);
#pragma unroll
  for (int i = 0; i < VALUES; i++) sum.value[i] *= scale;
  sum = Values::of(sum.packed());
#pragma unroll
  for (int i = 0; i < VALUES; i++) sum.value[i] *= factors.value[i];
  return sum.packed();
}
