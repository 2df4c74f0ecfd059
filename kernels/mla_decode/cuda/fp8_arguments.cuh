// Decode attention over e4m3 latents: arguments, constants, and the layout of shared memory.

#pragma once

#include "place.cuh"

constexpr int STAGES = 5;
constexpr int TILE_BYTES = BLOCK * WIDTH, ROPE_OFFSET = BLOCK * LATENT, CHUNK_BYTES = BLOCK * 128;
// A CTA's queries fill two stages, before they are quantized.
constexpr int BOX_CHANNELS = 32, BOX_BYTES = HEADS * 64, QUERY_BOXES = WIDTH / BOX_CHANNELS;
constexpr int VALUE_THREADS = 256, SCORE_THREADS = 128, PRODUCERS = 128;
constexpr int THREADS = VALUE_THREADS + SCORE_THREADS + PRODUCERS;

// A block, and likewise the query: four chunks of 64 rows of 128 bytes, and one of 64 rows of 64 bytes, swizzled. A block's
// probabilities take the place of that last one, its rope keys, once these have been scored.
static_assert(TILE_BYTES - ROPE_OFFSET == HEADS * BLOCK, "probabilities fit where rope keys were");
struct Shared {
  u8 query[TILE_BYTES];
  u8 tiles[STAGES][TILE_BYTES];
  // For each row: the factor by which earlier sums shrink, and at a piece's end kv_scale over the sum.
  float alpha[STAGES][HEADS];
  float inverse[STAGES][HEADS];
  // For each scoring warp: whether any of its factors is not one.
  uint4 raised[STAGES];
  // Here rather than in registers, which are scarce.
  Place place;
  // For even and odd blocks: all scoring warps have read the rope keys.
  u64 scored[2];
  u64 probabilities_full[STAGES];
  u64 full[STAGES];
  u64 empty[STAGES];
};

// A role's position in the blocks of its part: how many it has seen, and the stage of the present one.
struct Ring {
  int count = 0, stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ void next() {
    count++;
    advance();
  }
  // Moves on past a stage that holds queries.
  __device__ __forceinline__ void advance() {
    bool wraps = ++stage == STAGES;
    stage = wraps ? 0 : stage;
    phase ^= wraps;
  }
};

struct Arguments {
  // Boxes of the pool as rows of bytes: 64 rows of 128 bytes, and 64 rows of 64. Boxes of the queries: 64 rows of 64 bytes.
  TensorMap latents, keys, queries;
  // A unit of this kernel is a block.
  Work work;
  const u8* pool;
  float scale_log2, kv_scale;
};

// Each role calls this once it has read the first entries of the plan, which is older than the previous kernel.
__device__ __forceinline__ void wait_for_queries() {
  wait_for_earlier();
  start_next();
}

// The descriptor of an operand that lies `bytes` further on. Computing only the low word saves instructions between products.
__device__ __forceinline__ u64 further(u64 descriptor, u32 bytes) {
  return (descriptor & 0xFFFFFFFF00000000ull) | (u32)((u32)descriptor + bytes / 16);
}

// The thread's number, read again at each use. What the compiler computes from threadIdx.x ahead of a loop stays in registers, which
// are scarce here, and it then keeps the loop's addresses in each thread's registers too instead of in uniform ones.
__device__ __forceinline__ u32 own_thread() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
