// A thread's eight contiguous bf16 values of a row, and the quantization of the groups that 16 threads hold.

#pragma once

#include "hopper.cuh"

constexpr int VALUES = 8, GROUP = 128, GROUP_THREADS = GROUP / VALUES;

struct Values {
  float value[VALUES];

  __device__ __forceinline__ static Values of(uint4 packed) {
    u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    Values values;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      values.value[2 * i] = __uint_as_float(words[i] << 16);
      values.value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return values;
  }
  __device__ __forceinline__ uint4 packed() const {
    return make_uint4(pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]), pack_bf16(value[4], value[5]),
                      pack_bf16(value[6], value[7]));
  }
  __device__ __forceinline__ void add(const Values& other, float factor) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) value[i] = fmaf(other.value[i], factor, value[i]);
  }
};

// A load that the compiler keeps in program order, so that several are in flight together.
__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 found;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from) : "memory");
  return found;
}

// These 128 bytes are not read again, so the cache need not write them back to memory.
__device__ __forceinline__ void discard(const void* line) { asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory"); }

// The scale of the group that 16 neighbouring threads hold, for all groups of a warp at once.
__device__ __forceinline__ float scale_of(const Values& values) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; i++) largest = fmaxf(largest, fabsf(values.value[i]));
#pragma unroll
  for (int step = GROUP_THREADS / 2; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  return scale_of_group(largest);
}

__device__ __forceinline__ uint2 quantize(const Values& values, float scale) {
  float inverse = 1.0f / scale;
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = pack_e4m3(values.value[2 * i] * inverse, values.value[2 * i + 1] * inverse);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}
