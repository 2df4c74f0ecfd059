// Warpgroup products of bf16, and the layout of shared memory.

#pragma once

#include "place.cuh"

// Chunks of 64 channels. A query's last chunks are held in registers, which leaves shared memory for three quarters of a block
// more.
constexpr int CHUNK = 64, CHUNKS = WIDTH / CHUNK, CHUNK_BYTES = BLOCK * CHUNK * 2, HELD_CHUNKS = 6;
// Latents are copied, awaited and released two chunks at a time, in a ring. A query's held chunks pass through it too, before a
// piece's first block.
constexpr int PAIRS = LATENT / CHUNK / 2, HELD_PAIRS = HELD_CHUNKS / 2, PAIR_BYTES = 2 * CHUNK_BYTES, SLOTS = 11;

// Chunks are 64 rows of 128 bytes, swizzled.
struct Shared {
  u8 query[CHUNKS - HELD_CHUNKS][CHUNK_BYTES];
  u8 latents[SLOTS][PAIR_BYTES];
  u8 key[CHUNK_BYTES];
  u8 probabilities[2][CHUNK_BYTES];
  // For each row: the factor by which earlier sums shrink; at a piece's end, one over the sum, and the sum's logarithm.
  float alpha[2][HEADS];
  float inverse[2][HEADS];
  float log_sum[2][HEADS];
  u64 query_full;
  u64 key_full;
  u64 key_empty;
  u64 probabilities_full[2];
  u64 probabilities_empty[2];
  u64 full[SLOTS];
  u64 empty[SLOTS];
};

// A CTA's position in its blocks: how many it has seen, and where in the ring the present block's pairs lie. Pairs of the two
// halves of the channels alternate, so that both value warpgroups release one early.
struct RingPosition {
  int count = 0, slot = 0;
  u32 phase = 0;

  __device__ __forceinline__ int slot_of(int i) const { return slot + i < SLOTS ? slot + i : slot + i - SLOTS; }
  __device__ __forceinline__ u32 phase_of(int i) const { return slot + i < SLOTS ? phase : phase ^ 1; }
  __device__ __forceinline__ void skip(int pairs) {
    phase = phase_of(pairs);
    slot = slot_of(pairs);
  }
  __device__ __forceinline__ void next() {
    count++;
    skip(PAIRS);
  }
};

// Tells all CTAs of the cluster, one thread each, that this slot is free.
template <int CTAS>
__device__ __forceinline__ void release(u64* empty) {
  if (threadIdx.x % 128 < CTAS) arrive_at(empty, threadIdx.x % 128);
}

__device__ __forceinline__ constexpr int pair_at(int i) { return i % 2 * 2 + i / 2; }

// V as the second operand: channels are contiguous, 64 to a chunk; tokens lie in groups of 8 rows.
__device__ __forceinline__ u64 value_descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(CHUNK_BYTES >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ void multiply_bf16(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : BIND_32(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

// The first operand is in registers.
__device__ __forceinline__ void multiply_bf16(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : BIND_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The tensor cores read V transposed.
__device__ __forceinline__ void multiply_values(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, 1;\n}"
      : BIND_64(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

struct Arguments {
  // Boxes of 64 rows of 128 bytes in the pool and in the queries.
  TensorMap pool_boxes, query_boxes;
  Work work;
  const u8* pool;
  const u32* query;
  float scale_log2;
  // 1 if there are a few queries.
  int few;
};

// Each role calls this once it has read the first entries of the plan, which is older than the previous kernel.
__device__ __forceinline__ void wait_for_queries() {
  wait_for_earlier();
  start_next();
}

__device__ __forceinline__ long long first_row_of(const Work& work, const Place& place, int request) {
  return ((long long)request * work.query_tokens + place.query_index) * work.heads + place.first_head;
}
