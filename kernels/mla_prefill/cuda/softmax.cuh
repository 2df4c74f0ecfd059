// Online softmax of a thread's two rows of scores (Milakov and Gimelshein, 2018).

#pragma once

#include "../../cuda/hopper.cuh"

// Weights are relative to a reference, at first this one. It is raised to the largest score only once a score exceeds it by
// more than MARGIN (as powers of two): sums of weights up to 2^MARGIN lose nothing in float32, and most blocks need not
// scale earlier sums down.
constexpr float LOWEST = -1e30f, MARGIN = 8.0f;

struct Softmax {
  float reference[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};
  // The factor by which the last raise scales earlier sums down.
  float alpha[2];

  // Hides the scores of a block's keys after each row's `last` one, counted from the block's first key. Block 0 or 1 of a step.
  template <int N>
  __device__ __forceinline__ static void hide(float (&scores)[N], int block, const int (&last)[2]) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      if (i / 4 * 8 + i % 2 + column > last[i / 2 % 2]) scores[block * (N / 2) + i] = -__int_as_float(0x7F800000);
  }

  // Returns whether any row of this warp has raised its reference.
  template <int N>
  __device__ __forceinline__ bool raise(const float (&scores)[N], float scale) {
    float largest[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 1; i < N; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2)) * scale;
    }
    if (!__any_sync(~0u, largest[0] > reference[0] + MARGIN || largest[1] > reference[1] + MARGIN)) return false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float before = reference[half];
      reference[half] = fmaxf(before, largest[half]);
      alpha[half] = exp2_fast(before - reference[half]);
      total[half] *= alpha[half];
    }
    return true;
  }

  template <int N>
  __device__ __forceinline__ void exponentiate(float (&scores)[N], float scale) {
#pragma unroll
    for (int i = 0; i < N; i++) scores[i] = exp2_fast(fmaf(scores[i], scale, -reference[i / 2 % 2]));
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i++) sum[i / 2 % 2] += scores[i];
    total[0] += sum[0];
    total[1] += sum[1];
  }

  template <int N>
  __device__ __forceinline__ void scale_down(float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] *= alpha[i / 2 % 2];
  }

  // Adds up the shares of the four threads that have a row together.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] += __shfl_xor_sync(~0u, total[half], 1);
      total[half] += __shfl_xor_sync(~0u, total[half], 2);
    }
  }
  __device__ __forceinline__ float log_sum(int half) const {
    return (reference[half] + __log2f(total[half])) * 0.6931471805599453f;
  }
};
