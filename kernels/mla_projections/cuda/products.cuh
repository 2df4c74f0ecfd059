// bf16 products of 64 outputs by 16, 32, 64, 96 or 128 tokens over 16 inputs, both operands in shared memory.

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
template <int TRANSPOSED>
__device__ __forceinline__ void multiply(Product<16>& d, u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" NAMES_8 "}, %8, %9, p, 1, 1, %11, 0;\n}"
      : BIND_8(d.sum, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void multiply(Product<32>& d, u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NAMES_16 "}, %16, %17, p, 1, 1, %19, 0;\n}"
      : BIND_16(d.sum, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void multiply(Product<64>& d, u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, %35, 0;\n}"
      : BIND_32(d.sum, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void multiply(Product<96>& d, u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" NAMES_48 "}, %48, %49, p, 1, 1, %51, 0;\n}"
      : BIND_48(d.sum, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void multiply(Product<128>& d, u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, %67, 0;\n}"
      : BIND_64(d.sum, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}
