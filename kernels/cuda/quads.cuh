// Rows of which four neighbouring threads, a quad, have two columns of each eight, as products leave them in registers.

#pragma once

#include "hopper.cuh"

// A quad's threads exchange words, so that the i-th has word i of all four.
__device__ __forceinline__ uint4 exchange(const u32 (&words)[4]) {
  bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
  u32 kept[2] = {high ? words[2] : words[0], high ? words[3] : words[1]};
  u32 got[2] = {__shfl_xor_sync(~0u, high ? words[0] : words[2], 2), __shfl_xor_sync(~0u, high ? words[1] : words[3], 2)};
  u32 own = odd ? kept[1] : kept[0], far = odd ? got[1] : got[0];
  u32 near = __shfl_xor_sync(~0u, odd ? kept[0] : kept[1], 1), farthest = __shfl_xor_sync(~0u, odd ? got[0] : got[1], 1);
  uint2 here = odd ? make_uint2(near, own) : make_uint2(own, near);
  uint2 there = odd ? make_uint2(farthest, far) : make_uint2(far, farthest);
  return high ? make_uint4(there.x, there.y, here.x, here.y) : make_uint4(here.x, here.y, there.x, there.y);
}

// The scale of a group of 128 values, of which the thread has 32.
__device__ __forceinline__ float scale_of_quad(const float (&values)[32]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(values[i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  return scale_of_group(largest);
}

// Quantizes such a group. Then the quad's i-th thread has columns 32 i to 32 i + 31, in order.
__device__ __forceinline__ void quantize_quad(uint4 (&packed)[2], const float (&values)[32], float scale) {
  float inverse = 1.0f / scale;
  // Two columns each of two neighbouring eights.
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float* from = values + i * 4;
    pairs[i] = pack_e4m3(from[0] * inverse, from[1] * inverse) | pack_e4m3(from[2] * inverse, from[3] * inverse) << 16;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 words[4] = {pairs[half], pairs[2 + half], pairs[4 + half], pairs[6 + half]};
    uint4 got = exchange(words);
    packed[half] = make_uint4(__byte_perm(got.x, got.y, 0x5410), __byte_perm(got.z, got.w, 0x5410),
                              __byte_perm(got.x, got.y, 0x7632), __byte_perm(got.z, got.w, 0x7632));
  }
}
