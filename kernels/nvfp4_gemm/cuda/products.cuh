// NVFP4 weights as wgmma's register operand: their decoding, and products of 64 outputs with 16 to 128 rows over 16 inputs.

#pragma once

#include "../../cuda/hopper.cuh"

// Places of a sign and an e2m1 magnitude in two bf16 numbers: 2^-126 times the code's value, the subnormal 0.5 included.
constexpr u32 CODES = 0x81C081C0u;
// The bits that scales' exponents have in addition to the packed ones.
constexpr u32 EXPONENT = 0x70007000u;

__device__ __forceinline__ u32 scaled(u32 values, u32 scale) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(values), "r"(scale));
  return product;
}

__device__ __forceinline__ u32 twice_low(u32 pair) {
  u32 twice;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};\n}" : "=r"(twice) : "r"(pair));
  return twice;
}
__device__ __forceinline__ u32 twice_high(u32 pair) {
  u32 twice;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};\n}" : "=r"(twice) : "r"(pair));
  return twice;
}

// A thread's operand of one product: a word of eight codes (packing.py) of two outputs, and the scales of both.
__device__ __forceinline__ void decode(u32 (&a)[4], u32 word, u32 scales) {
  u32 first = twice_low(scales), second = twice_high(scales);
  a[0] = scaled(word & CODES, first);
  a[1] = scaled(word << 6 & CODES, second);
  a[2] = scaled(__funnelshift_r(word, word, 4) & CODES, first);
  a[3] = scaled((word << 2 ^ word >> 6) & CODES, second);
}

// Scales of two products for two outputs each (packing.py): bf16 numbers, 2^118 times the scales.
__device__ __forceinline__ void decode_scales(u32 (&scales)[2], u32 word, u32 exponent) {
  constexpr u32 BITS = 0x0FF00FF0u;
  scales[0] = (word & BITS) | exponent;
  scales[1] = (__byte_perm(word, word, 0x2301) & BITS) | exponent;
}

// Makes operands ready here: otherwise the compiler decodes between products, and each then waits for the one before.
__device__ __forceinline__ void pin(u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[i])::"memory");
}

#define MULTIPLY(ROWS, HALF, A0, A1, A2, A3, B)                                                                         \
  __device__ __forceinline__ void multiply_bf16(float (&d)[HALF], const u32 (&a)[4], u64 b) {                                \
    asm volatile(                                                                                                       \
        "wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" NAMES_##HALF "}, {%" #A0 ", %" #A1 ", %" #A2    \
        ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                                                                             \
        : BIND_##HALF(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                      \
  }
MULTIPLY(16, 8, 8, 9, 10, 11, 12)
MULTIPLY(32, 16, 16, 17, 18, 19, 20)
MULTIPLY(48, 24, 24, 25, 26, 27, 28)
MULTIPLY(64, 32, 32, 33, 34, 35, 36)
MULTIPLY(96, 48, 48, 49, 50, 51, 52)
MULTIPLY(128, 64, 64, 65, 66, 67, 68)
#undef MULTIPLY
