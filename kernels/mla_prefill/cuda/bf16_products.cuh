// Warpgroup products of bf16: 64 rows by 64 to 256 columns over 16 inputs.

#pragma once

#include "../../cuda/hopper.cuh"

// V as the second operand: channels are contiguous, in chunks of 64 that lie CHUNK_BYTES apart; keys lie in groups of 8 rows.
template <int CHUNK_BYTES>
__device__ __forceinline__ u64 value_descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(CHUNK_BYTES >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// S = Q K^T: 16 channels of each row, of queries in registers.
__device__ __forceinline__ void multiply_keys(float (&scores)[64], const u32 (&query)[4], u64 key, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : BIND_64(scores, 0) : "r"(query[0]), "r"(query[1]), "r"(query[2]), "r"(query[3]), "l"(key), "r"(accumulate));
}

// 64 keys, of queries in registers or in shared memory.
__device__ __forceinline__ void multiply_keys(float (&scores)[32], const u32 (&query)[4], u64 key, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : BIND_32(scores, 0) : "r"(query[0]), "r"(query[1]), "r"(query[2]), "r"(query[3]), "l"(key), "r"(accumulate));
}
__device__ __forceinline__ void multiply_keys(float (&scores)[32], u64 query, u64 key, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : BIND_32(scores, 0) : "l"(query), "l"(key), "r"(accumulate));
}

// O += P V: weights of 16 keys in registers. The tensor cores read V transposed.
__device__ __forceinline__ void add_values(float (&out)[64], const u32 (&weights)[4], u64 value) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : BIND_64(out, 0) : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(value));
}

// 192 and 256 channels.
__device__ __forceinline__ void add_values(float (&out)[96], const u32 (&weights)[4], u64 value) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NAMES_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 1;"
      : BIND_96(out, 0) : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(value));
}
__device__ __forceinline__ void add_values(float (&out)[128], const u32 (&weights)[4], u64 value) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : BIND_128(out, 0) : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(value));
}

__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}
