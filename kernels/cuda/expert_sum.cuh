// The weighted sum of the outputs that a token's experts have for it. A thread has eight values.

#pragma once

#include "values.cuh"

// As `kernels.moe_permute.ExpertOutputs` has them.
struct ExpertSum {
  // bf16, eight values an element: rows of the width.
  const uint4* rows;
  // [tokens, CHOICES]: negative where a choice has no row.
  const long long* positions;
  const float* weights;
  // [tokens, width] of shared experts that are a layer of their own, added as they are. Null if there are none.
  const uint4* shared;
};

// The sum, rounded once. width: of a row, in elements.
template <int CHOICES>
__device__ __forceinline__ uint4 add_up(const ExpertSum& given, long long token, int width, int at) {
  uint4 found[CHOICES];
#pragma unroll
  for (int i = 0; i < CHOICES; i++) {
    long long position = given.positions[token * CHOICES + i];
    found[i] = position < 0 ? uint4{} : load(given.rows + position * width + at);
  }
  uint4 shared = given.shared ? load(given.shared + token * width + at) : uint4{};
  Values sum = {};
#pragma unroll
  for (int i = 0; i < CHOICES; i++) sum.add(Values::of(found[i]), given.weights[token * CHOICES + i]);
  sum.add(Values::of(shared), 1.0f);
  return sum.packed();
}
