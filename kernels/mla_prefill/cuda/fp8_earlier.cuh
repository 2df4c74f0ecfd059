// A thread's earlier sums: its sums are moved here from time to time, since the tensor cores' own have too few bits.

#pragma once

#include "fp8_tiles.cuh"

struct Earlier {
  static constexpr int QUADS = 16;
  // This thread's first quad in shared memory; the next ones lie WARPGROUP quads apart.
  float4* sums;

  __device__ __forceinline__ Earlier(Shared& shared, int half) : sums(&shared.earlier[half][0][threadIdx.x % WARPGROUP]) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) sums[i * WARPGROUP] = make_float4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void add(const float (&out)[64]) const {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4 sum = sums[i * WARPGROUP];
      sums[i * WARPGROUP] = make_float4(sum.x + out[4 * i], sum.y + out[4 * i + 1], sum.z + out[4 * i + 2], sum.w + out[4 * i + 3]);
    }
  }

  __device__ __forceinline__ void scale_down(const float (&alpha)[2]) const {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4 sum = sums[i * WARPGROUP];
      sums[i * WARPGROUP] = make_float4(sum.x * alpha[0], sum.y * alpha[0], sum.z * alpha[1], sum.w * alpha[1]);
    }
  }

  __device__ __forceinline__ void add_to(float (&out)[64]) const {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4 sum = sums[i * WARPGROUP];
      out[4 * i] += sum.x, out[4 * i + 1] += sum.y, out[4 * i + 2] += sum.z, out[4 * i + 3] += sum.w;
    }
  }
};
