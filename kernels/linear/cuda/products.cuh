// bf16 products of 64 outputs by 16, 32, 48 or 64 tokens over 16 inputs, both operands in shared memory.

#pragma once

#include "../../cuda/hopper.cuh"

// A thread's element j * 4 + h * 2 + i is token j * 8 + lane % 4 * 2 + i and output warp % 4 * 16 + h * 8 + lane / 4.
#define MULTIPLY(TOKENS, SUMS, WEIGHT, X, ADD)                                                                   \
  __device__ __forceinline__ void multiply_step(float(&sum)[TOKENS / 2], u64 weight, u64 x, int add) {           \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #ADD ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" NAMES_##SUMS "}, %" #WEIGHT   \
                 ", %" #X ", p, 1, 1, 0, 0;\n}"                                                                  \
                 : BIND_##SUMS(sum, 0) : "l"(weight), "l"(x), "r"(add));                                         \
  }
MULTIPLY(16, 8, 8, 9, 10)
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(48, 24, 24, 25, 26)
MULTIPLY(64, 32, 32, 33, 34)
#undef MULTIPLY
