// A sum over the threads of a cluster's CTAs.

#pragma once

#include "cluster.cuh"

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
