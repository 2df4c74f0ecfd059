// Warpgroup products of e4m3 with 32 inputs, the first operand in registers.

#pragma once

#include "../../cuda/hopper.cuh"

// Descriptor of a K-major operand whose rows have 32 bytes.
__device__ __forceinline__ u64 descriptor_32(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(256 >> 4) << 32) | (3ull << 62);
}

// S = Q K^T: 160 keys.
__device__ __forceinline__ void multiply_keys(float (&scores)[80], const u32 (&query)[4], u64 key, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %85, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 {" NAMES_80 "}, {%80, %81, %82, %83}, %84, p, 1, 1;\n}"
      : BIND_80(scores, 0) : "r"(query[0]), "r"(query[1]), "r"(query[2]), "r"(query[3]), "l"(key), "r"(accumulate));
}

// O += P V: 128 channels, whose keys are contiguous.
__device__ __forceinline__ void add_values(float (&out)[64], const u32 (&weights)[4], u64 value, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
      : BIND_64(out, 0) : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(value), "r"(accumulate));
}

// Sums of a row's weights, as they were rounded: 8 equal columns, of which a thread has two for each of its two rows.
__device__ __forceinline__ void add_weights(float (&sums)[4], const u32 (&weights)[4], u64 ones, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1;\n}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(ones), "r"(accumulate));
}

// Four neighbouring e4m3 numbers.
__device__ __forceinline__ u32 pack_four(float a, float b, float c, float d) {
  u32 packed;
  asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}" : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}
