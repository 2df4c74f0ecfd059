// Online softmax of a thread's two rows of scores, with weights in e4m3.

#pragma once

#include "fp8_products.cuh"
#include "fp8_tiles.cuh"

constexpr int SCORES = KEYS / 2;
// Weights are relative to a reference, a power of two, so that rounding to e4m3 does not depend on it. They are stored
// 2^LOG2_WEIGHT times as large, and the reference is raised once a weight would exceed 2^8: e4m3's largest number is 448.
constexpr float LOWEST = -1e30f, MARGIN = 2.0f, LOG2_WEIGHT = 8.0f - MARGIN;

struct Softmax {
  // `total`: each row's sum of weights.
  float reference[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};
  // The factor by which the last raise scales earlier sums down.
  float alpha[2];

  // Hides the scores of a step's keys after each row's `last` one, counted from the step's first key.
  __device__ __forceinline__ static void hide(float (&scores)[SCORES], const int (&last)[2]) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (i / 4 * 8 + i % 2 + column > last[i / 2 % 2]) scores[i] = -__int_as_float(0x7F800000);
  }

  // scale: of each row's scores; shift: the logarithm of the values' scale. Returns whether any row of this warp has raised its
  // reference: sums up to the step before are relative to the earlier one.
  __device__ __forceinline__ bool raise(const float (&scores)[SCORES], const float (&scale)[2], float shift) {
    float largest[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 1; i < SCORES; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
#pragma unroll
    for (int side = 0; side < 2; side++) {
      largest[side] = fmaxf(largest[side], __shfl_xor_sync(~0u, largest[side], 1));
      largest[side] = fmaf(fmaxf(largest[side], __shfl_xor_sync(~0u, largest[side], 2)), scale[side], shift);
    }
    if (!__any_sync(~0u, largest[0] > reference[0] + MARGIN || largest[1] > reference[1] + MARGIN)) return false;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      float before = reference[side];
      reference[side] = fmaxf(before, ceilf(largest[side]));
      alpha[side] = exp2_fast(before - reference[side]);
    }
    return true;
  }

  __device__ __forceinline__ void exponentiate(float (&scores)[SCORES], const float (&scale)[2], float shift) const {
    float from[2] = {shift + LOG2_WEIGHT - reference[0], shift + LOG2_WEIGHT - reference[1]};
#pragma unroll
    for (int i = 0; i < SCORES; i++) scores[i] = exp2_fast(fmaf(scores[i], scale[i / 2 % 2], from[i / 2 % 2]));
  }

  // The scores' registers hold the keys that the next product's first operand wants: V's keys are stored in this order.
  __device__ __forceinline__ static void pack(u32 (&weights)[KEYS / 32][4], const float (&scores)[SCORES]) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
      int at = i / 2 * 8 + i % 2 * 2;
      weights[i / 4][i % 4] = pack_four(scores[at], scores[at + 1], scores[at + 4], scores[at + 5]);
    }
  }

  // sums: of a step's weights; inverse: of the scale of its values, which is in them.
  __device__ __forceinline__ void count(const float (&sums)[4], float inverse) {
    total[0] = fmaf(sums[0], inverse, total[0]);
    total[1] = fmaf(sums[2], inverse, total[1]);
  }

  __device__ __forceinline__ void scale_down(float (&out)[64]) {
    total[0] *= alpha[0], total[1] *= alpha[1];
#pragma unroll
    for (int i = 0; i < 64; i++) out[i] *= alpha[i / 2 % 2];
  }
};
