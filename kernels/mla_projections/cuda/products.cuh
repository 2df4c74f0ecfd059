// bf16 products of 64 outputs by 16, 24, 32, 64, 96 or 128 tokens over 16 inputs, both operands in shared memory.

#pragma once

#include "../../cuda/values.cuh"
#include "../../mla_decode/cuda/parts.cuh"

// A head's weight lies in boxes of 128 rows of 128 bytes (64 elements), swizzled.
constexpr int ELEMENTS = 64, LINE = 128, WEIGHT_BYTES = GROUP * LINE;
constexpr int THREADS = 256, WARPS = THREADS / 32;

// A thread has 4 elements for each 8 tokens. Element j * 4 + h * 2 + i is token j * 8 + lane % 4 * 2 + i and output
// warp % 4 * 16 + h * 8 + lane / 4.
template <int TOKENS>
struct Product {
  float sum[TOKENS / 2];
};

// TRANSPOSED: whether the first operand's outputs are contiguous, instead of its inputs.
#define MULTIPLY(TOKENS, SUMS, A, B, ADD, TRANSPOSE)                                                                   \
  template <int TRANSPOSED>                                                                                            \
  __device__ __forceinline__ void multiply(Product<TOKENS>& d, u64 a, u64 b, int accumulate) {                         \
    asm volatile(                                                                                                      \
        "{\n .reg .pred p;\n setp.ne.b32 p, %" #ADD ", 0;\n"                                                           \
        "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" NAMES_##SUMS "}, %" #A ", %" #B              \
        ", p, 1, 1, %" #TRANSPOSE ", 0;\n}"                                                                            \
        : BIND_##SUMS(d.sum, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));                                   \
  }

MULTIPLY(16, 8, 8, 9, 10, 11)
MULTIPLY(24, 12, 12, 13, 14, 15)
MULTIPLY(32, 16, 16, 17, 18, 19)
MULTIPLY(64, 32, 32, 33, 34, 35)
MULTIPLY(96, 48, 48, 49, 50, 51)
MULTIPLY(128, 64, 64, 65, 66, 67)
#undef MULTIPLY
