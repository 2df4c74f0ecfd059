// Latents of tokens, normalized, and their keys, rotated, to their places in the pool: a warp a token.

#pragma once

#include "../../cuda/bf16_pairs.cuh"
#include "../../mla_decode/cuda/parts.cuh"

struct LatentArguments {
  // [tokens, LATENT + ROPE] in bf16, rows `row_bytes` apart; null if nothing is written.
  const u8* latents;
  // Factors of the norm, eight an element.
  const uint4* weight;
  const long long* slots;
  u8* pool;
  // Whether the pool is in e4m3, where a latent is `scale` times what is stored.
  int row_bytes, compresses;
  float epsilon, scale;
};

__device__ __forceinline__ u32 compressed_pair(u32 pair, float scale) {
  return pack_e4m3(__fdiv_rn(low_of(pair), scale), __fdiv_rn(high_of(pair), scale));
}

__device__ __forceinline__ void write_latent(const LatentArguments& given, const float2* rotations, int token) {
  constexpr int RUNS = LATENT / 8 / 32, PAIRS = (WIDTH - LATENT) / 2;
  static_assert(PAIRS == 32, "a lane rotates a pair");
  int lane = threadIdx.x % 32;
  const u8* own = given.latents + (long long)token * given.row_bytes;
  uint4 found[RUNS], factors[RUNS];
#pragma unroll
  for (int i = 0; i < RUNS; i++) {
    found[i] = reinterpret_cast<const uint4*>(own)[i * 32 + lane];
    factors[i] = given.weight[i * 32 + lane];
  }
  u32 key = reinterpret_cast<const u32*>(own + LATENT * 2)[lane];
  float2 turn = rotations[(long long)token * PAIRS + lane];
  u8* target = given.pool + given.slots[token] * (given.compresses ? WIDTH : 2 * WIDTH);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < RUNS; i++) sum += squares(found[i]);
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  float scale = rsqrtf(sum / LATENT + given.epsilon);
  u32 turned = pack_bf16(low_of(key) * turn.x - high_of(key) * turn.y, low_of(key) * turn.y + high_of(key) * turn.x);
#pragma unroll
  for (int i = 0; i < RUNS; i++) {
    uint4 made = normalized(found[i], scale, factors[i]);
    if (given.compresses)
      reinterpret_cast<uint2*>(target)[i * 32 + lane] =
          make_uint2(compressed_pair(made.x, given.scale) | compressed_pair(made.y, given.scale) << 16,
                     compressed_pair(made.z, given.scale) | compressed_pair(made.w, given.scale) << 16);
    else
      reinterpret_cast<uint4*>(target)[i * 32 + lane] = made;
  }
  if (given.compresses)
    reinterpret_cast<unsigned short*>(target + LATENT)[lane] = compressed_pair(turned, given.scale);
  else
    reinterpret_cast<u32*>(target + LATENT * 2)[lane] = turned;
}
