// bf16 products of 64 outputs by 16 to 128 tokens over 16 inputs, both operands in shared memory.

#pragma once

#include "hopper.cuh"

// A thread has 4 sums for each 8 tokens: j * 4 + h * 2 + i is token j * 8 + lane % 4 * 2 + i and output
// warp % 4 * 16 + h * 8 + lane / 4. TRANSPOSED: whether the weight's outputs are contiguous, instead of its inputs.
#define MULTIPLY(TOKENS, SUMS, WEIGHT, X, ADD, TRANSPOSE)                                                              \
  template <int TRANSPOSED = 0>                                                                                        \
  __device__ __forceinline__ void multiply_step(float (&sum)[TOKENS / 2], u64 weight, u64 x, int add) {                \
    asm volatile(                                                                                                      \
        "{\n .reg .pred p;\n setp.ne.b32 p, %" #ADD ", 0;\n"                                                           \
        "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" NAMES_##SUMS "}, %" #WEIGHT ", %" #X         \
        ", p, 1, 1, %" #TRANSPOSE ", 0;\n}"                                                                            \
        : BIND_##SUMS(sum, 0) : "l"(weight), "l"(x), "r"(add), "n"(TRANSPOSED));                                       \
  }
MULTIPLY(16, 8, 8, 9, 10, 11)
MULTIPLY(24, 12, 12, 13, 14, 15)
MULTIPLY(32, 16, 16, 17, 18, 19)
MULTIPLY(48, 24, 24, 25, 26, 27)
MULTIPLY(64, 32, 32, 33, 34, 35)
MULTIPLY(96, 48, 48, 49, 50, 51)
MULTIPLY(128, 64, 64, 65, 66, 67)
#undef MULTIPLY
