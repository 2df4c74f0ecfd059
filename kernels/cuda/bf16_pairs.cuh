// Pairs of bf16 values in a word, and eight of them in four: their squares, sums, and a norm's last step.

#pragma once

#include "hopper.cuh"

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ float squares(u32 pair) { return low_of(pair) * low_of(pair) + high_of(pair) * high_of(pair); }
__device__ __forceinline__ float squares(uint4 x) { return squares(x.x) + squares(x.y) + squares(x.z) + squares(x.w); }

__device__ __forceinline__ u32 sum_of(u32 x, u32 y) { return pack_bf16(low_of(x) + low_of(y), high_of(x) + high_of(y)); }
__device__ __forceinline__ uint4 sum_of(uint4 x, uint4 y) {
  return make_uint4(sum_of(x.x, y.x), sum_of(x.y, y.y), sum_of(x.z, y.z), sum_of(x.w, y.w));
}

// Rounded twice, as the reference does: after the scale, and after the factors.
__device__ __forceinline__ u32 normalized(u32 pair, float scale, u32 factors) {
  u32 rounded = pack_bf16(low_of(pair) * scale, high_of(pair) * scale);
  return pack_bf16(low_of(rounded) * low_of(factors), high_of(rounded) * high_of(factors));
}
__device__ __forceinline__ uint4 normalized(uint4 x, float scale, uint4 factors) {
  return make_uint4(normalized(x.x, scale, factors.x), normalized(x.y, scale, factors.y), normalized(x.z, scale, factors.z),
                    normalized(x.w, scale, factors.w));
}
