// Residual addition and RMSNorm of a row that a cluster of CTAs does, a thread's eight values.

#pragma once

#include "cluster_sum.cuh"
#include "values.cuh"

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
