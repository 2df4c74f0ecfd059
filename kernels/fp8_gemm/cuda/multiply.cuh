// Products of 64 by 16, 32, 96 or 128 rows of two operands in shared memory, over 32 inputs. hopper.cuh has 64 by 64.

#pragma once

#include "../../cuda/hopper.cuh"

__device__ __forceinline__ void multiply(float (&d)[8], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {" NAMES_8 "}, %8, %9, p, 1, 1;\n}"
      : BIND_8(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(float (&d)[16], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" NAMES_16 "}, %16, %17, p, 1, 1;\n}"
      : BIND_16(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(float (&d)[48], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {" NAMES_48 "}, %48, %49, p, 1, 1;\n}"
      : BIND_48(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, %64, %65, p, 1, 1;\n}"
      : BIND_64(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}
