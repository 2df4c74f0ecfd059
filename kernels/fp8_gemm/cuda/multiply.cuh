// Products of 64 by 16, 32, 96 or 128 rows of two operands in shared memory, over 32 inputs. hopper.cuh has 64 by 64.

#pragma once

#include "../../cuda/hopper.cuh"

#define MULTIPLY(ROWS, SUMS, A, B, ADD)                                                                                \
  __device__ __forceinline__ void multiply(float (&d)[SUMS], u64 a, u64 b, int accumulate) {                           \
    asm volatile(                                                                                                      \
        "{\n .reg .pred p;\n setp.ne.b32 p, %" #ADD ", 0;\n"                                                           \
        "wgmma.mma_async.sync.aligned.m64n" #ROWS "k32.f32.e4m3.e4m3 {" NAMES_##SUMS "}, %" #A ", %" #B                \
        ", p, 1, 1;\n}"                                                                                                \
        : BIND_##SUMS(d, 0) : "l"(a), "l"(b), "r"(accumulate));                                                        \
  }

MULTIPLY(16, 8, 8, 9, 10)
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(96, 48, 48, 49, 50)
MULTIPLY(128, 64, 64, 65, 66)
#undef MULTIPLY
