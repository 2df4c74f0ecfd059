// INT4 weights as wgmma's register operand: their decoding, and products of 64 outputs with 8 to 128 rows over 32 inputs.

#pragma once

#include "../../cuda/hopper.cuh"

// How the experts' weights are packed (operands.py).
constexpr int TILE_OUTPUTS = 64, GROUP_INPUTS = 128, WEIGHT_BYTES = TILE_OUTPUTS * GROUP_INPUTS / 2;
// With one scale of each output, over all of a tile's inputs.
constexpr int SCALE_BYTES = TILE_OUTPUTS * 2, TILE_BYTES = WEIGHT_BYTES + SCALE_BYTES;
constexpr int MOST_EXPERTS = 512;

// Four e4m3 numbers of a word of eight weights (operands.py): 2^-9 times the weights of one output, subnormal; of the other
// output if the word is rotated right by 4. With MINIMUM also -8, which is coded as -0: a set sign without magnitude gets
// the bit of 8.
template <bool MINIMUM>
__device__ __forceinline__ u32 decode(u32 word) {
  u32 numbers = word & 0x87878787u;
  if (MINIMUM) numbers |= (numbers >> 4 & 0x08080808u) & ~((numbers & 0x07070707u) + 0x07070707u);
  return numbers;
}

// A thread's weights for one product: two words, each of four inputs of two outputs.
template <bool MINIMUM>
__device__ __forceinline__ void decode(u32 (&a)[4], u32 first, u32 second) {
  a[0] = decode<MINIMUM>(first);
  a[1] = decode<MINIMUM>(__funnelshift_r(first, first, 4));
  a[2] = decode<MINIMUM>(second);
  a[3] = decode<MINIMUM>(__funnelshift_r(second, second, 4));
}

// Makes operands ready here: otherwise the compiler decodes between products, and each then waits for the one before.
__device__ __forceinline__ void pin(u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// The product with 64 rows is in hopper.cuh.
#define MULTIPLY(ROWS, HALF, A0, A1, A2, A3, B, ACCUMULATE)                                                             \
  __device__ __forceinline__ void multiply(float (&d)[HALF], const u32 (&a)[4], u64 b, int accumulate) {                \
    asm volatile(                                                                                                       \
        "{\n .reg .pred p;\n setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                                     \
        "wgmma.mma_async.sync.aligned.m64n" #ROWS "k32.f32.e4m3.e4m3 {" NAMES_##HALF "}, {%" #A0 ", %" #A1 ", %" #A2    \
        ", %" #A3 "}, %" #B ", p, 1, 1;\n}"                                                                             \
        : BIND_##HALF(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                      \
  }
MULTIPLY(8, 4, 4, 5, 6, 7, 8, 9)
MULTIPLY(16, 8, 8, 9, 10, 11, 12, 13)
MULTIPLY(24, 12, 12, 13, 14, 15, 16, 17)
MULTIPLY(32, 16, 16, 17, 18, 19, 20, 21)
MULTIPLY(40, 20, 20, 21, 22, 23, 24, 25)
MULTIPLY(48, 24, 24, 25, 26, 27, 28, 29)
MULTIPLY(56, 28, 28, 29, 30, 31, 32, 33)
MULTIPLY(96, 48, 48, 49, 50, 51, 52, 53)
MULTIPLY(128, 64, 64, 65, 66, 67, 68, 69)
#undef MULTIPLY
