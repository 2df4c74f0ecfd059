// Decode attention over e4m3 latents: arguments and constants.

#pragma once

#include "parts.cuh"

constexpr int STAGES = 5;
constexpr int TILE_BYTES = BLOCK * WIDTH, ROPE_OFFSET = BLOCK * LATENT, CHUNK_BYTES = BLOCK * 128;
constexpr int CONSUMERS = 256, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
// Probabilities are stored 16 times as large, so that e4m3's smallest steps are far below the largest one. The maximum that
// they are relative to is raised only when it has grown by more than RAISE (log2). That keeps them below e4m3's largest number,
// 448, and earlier sums seldom have to be scaled down.
constexpr float LOG2_P = 4.0f, RAISE = 4.0f;

struct Arguments {
  // Boxes of the pool as rows of bytes: 64 rows of 128 bytes, and 64 rows of 64.
  TensorMap latents, keys;
  // A unit of this kernel is two blocks.
  Work work;
  const u32* query;
  const u8* pool;
  float scale_log2, kv_scale;
};
