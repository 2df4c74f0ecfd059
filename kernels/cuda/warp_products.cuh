// Products of a warp on the tensor cores, with both operands in registers: 16 rows by 16 inputs times 16 inputs by 8 columns.
//
// A lane has of the rows lane / 4 and lane / 4 + 8, and of the columns lane / 4, the inputs that its place in the quad, lane % 4, says:
// any four, if rows and columns agree. Of the sums it has columns lane % 4 * 2 and one more: [row][column].

#pragma once

#include "hopper.cuh"

__device__ __forceinline__ void multiply_f16(float (&sum)[4], uint2 row, uint2 later_row, uint2 column) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(row.x), "r"(later_row.x), "r"(row.y), "r"(later_row.y), "r"(column.x), "r"(column.y));
}

__device__ __forceinline__ void multiply_bf16(float (&sum)[4], uint2 row, uint2 later_row, uint2 column) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(row.x), "r"(later_row.x), "r"(row.y), "r"(later_row.y), "r"(column.x), "r"(column.y));
}

// Four e4m3 numbers as two pairs of float16, exactly.
__device__ __forceinline__ uint2 unpack_e4m3(u32 packed) {
  uint2 pairs;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.rn.f16x2.e4m3x2 %0, low;\n cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs.x), "=r"(pairs.y) : "r"(packed));
  return pairs;
}

__device__ __forceinline__ u32 word(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// bfloat16 reaches further than float16, so a value takes two columns: magnitudes up to LARGEST times 2^8, and larger ones times 2^-20.
// From 2^-22 to 2^36 nothing is lost.
constexpr float LARGEST = 128.0f, OF_SMALLER = 256.0f, OF_LARGER = 1.0f / (1 << 20);

__device__ __forceinline__ unsigned short float16_of(float x) {
  unsigned short rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
  return rounded;
}
__device__ __forceinline__ unsigned short smaller_of(float x) { return float16_of(fabsf(x) > LARGEST ? 0.0f : x * OF_SMALLER); }
__device__ __forceinline__ unsigned short larger_of(float x) { return float16_of(fabsf(x) > LARGEST ? x * OF_LARGER : 0.0f); }
__device__ __forceinline__ float joined(float smaller, float larger) { return fmaf(larger, 1 / OF_LARGER, smaller * (1 / OF_SMALLER)); }

// Loads of what is read once. Not by the path for constants: the compiler would move such loads past the wait for earlier kernels.
__device__ __forceinline__ uint4 load_weights(const void* from) {
  uint4 found;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from) : "memory");
  return found;
}
__device__ __forceinline__ float load_scale(const float* from) {
  float found;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(found) : "l"(from) : "memory");
  return found;
}
