// Decode attention over e4m3 latents: arguments, and what probabilities refer to.

#pragma once

#include "parts.cuh"

constexpr int STAGES = 5;
constexpr int TILE_BYTES = BLOCK * WIDTH, ROPE_OFFSET = BLOCK * LATENT, CHUNK_BYTES = BLOCK * 128;
constexpr int CONSUMERS = 256, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
// Probabilities are kept 16 times as large: e4m3's smallest steps are then far below the largest. The maximum they refer
// to is raised only when it has grown by more than RAISE (log2), which keeps them below e4m3's end, 448, and makes it rare
// that what was summed must be made smaller.
constexpr float LOG2_P = 4.0f, RAISE = 4.0f;

struct Arguments {
  // Of the pool as rows of bytes: 64 rows of 128, and of 64.
  TensorMap latents, keys;
  // Its unit is two blocks.
  Work work;
  const u32* query;
  const u8* pool;
  float scale_log2, kv_scale;
};
