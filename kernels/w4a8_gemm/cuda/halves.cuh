// INT4 weights and e4m3 rows as 16-bit floats, and their products. Hopper's `mma.sync` of e4m3 numbers is one of 16-bit
// floats too, to which it first converts both operands.

#pragma once

#include "../../cuda/hopper.cuh"

// What a product of decoded weights is multiplied by.
constexpr float DECODED = 65536.0f;

// A word of eight weights (weight.py), none of which is -8: four inputs of two outputs that are 8 apart. Sign and
// magnitude become the high byte, 2^-16 times the weight: the smallest normal numbers go on where subnormals end.
// Inputs 0 and 2 of the first and the second output, then 1 and 3.
__device__ __forceinline__ void decode_halves(u32 (&a)[4], u32 word) {
  a[0] = word << 8 & 0x87008700u;
  a[1] = word << 4 & 0x87008700u;
  a[2] = word & 0x87008700u;
  a[3] = __funnelshift_r(word, word, 4) & 0x87008700u;
}

// Four inputs of a row in the weights' order.
__device__ __forceinline__ void widen(u32 (&b)[2], u32 word) {
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n"
      " cvt.rn.f16x2.e4m3x2 %0, low;\n cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(b[0]), "=r"(b[1]) : "r"(__byte_perm(word, 0, 0x3120)));
}

// 16 outputs of eight rows over 16 inputs. A thread has d[h * 2 + i] of output h * 8 + lane / 4 and row lane % 4 * 2 +
// i.
__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
