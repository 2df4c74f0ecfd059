// Quantizes a CTA's queries: part of the scoring warpgroup's role.

#pragma once

#include "fp8_arguments.cuh"

__device__ __forceinline__ void scorers_meet() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

// The larger magnitudes of two pairs of bf16 values.
__device__ __forceinline__ u32 larger_magnitudes(u32 x, u32 y) {
  u32 larger;
  asm("{\n .reg .b32 magnitudes;\n abs.bf16x2 magnitudes, %2;\n max.bf16x2 %0, %1, magnitudes;\n}" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}

// Quantizes 8 values of a row and stores them. Four threads, each with its `quarter` of a box's 32 channels, do a row.
__device__ __forceinline__ void store_codes(Shared& shared, int box, int row, int quarter, const uint4& values, float inverse) {
  u32 words[4] = {values.x, values.y, values.z, values.w}, codes[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    codes[i] = pack_e4m3(__uint_as_float(words[i] << 16) * inverse, __uint_as_float(words[i] & 0xFFFF0000u) * inverse);
  int column = box % 4 * 2 + quarter / 2;
  u8* target = box < LATENT / BOX_CHANNELS ? shared.query + box / 4 * CHUNK_BYTES + row * 128 + (column ^ (row & 7)) * 16
                                           : shared.query + ROPE_OFFSET + row * 64 + (column ^ (row >> 1 & 3)) * 16;
  *reinterpret_cast<uint2*>(target + quarter % 2 * 8) = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
}

// Quantizes a row of bf16 values, which lies in two stages of the ring, and returns its scale.
__device__ __forceinline__ float quantize_row(Shared& shared, int stage, int next_stage, int row, bool exists) {
  int quarter = threadIdx.x % 4;
  u32 at = row * 64 + (quarter ^ (row >> 1 & 3)) * 16, largest = 0;
  uint4 values[QUERY_BOXES];
#pragma unroll
  for (int box = 0; box < QUERY_BOXES; box++) {
    const u8* tile = shared.tiles[box < QUERY_BOXES / 2 ? stage : next_stage] + box % (QUERY_BOXES / 2) * BOX_BYTES;
    values[box] = exists ? *reinterpret_cast<const uint4*>(tile + at) : make_uint4(0, 0, 0, 0);
    largest = larger_magnitudes(largest, values[box].x);
    largest = larger_magnitudes(largest, values[box].y);
    largest = larger_magnitudes(largest, values[box].z);
    largest = larger_magnitudes(largest, values[box].w);
  }
  largest = larger_magnitudes(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = larger_magnitudes(largest, __shfl_xor_sync(~0u, largest, 2));
  float magnitude = fmaxf(__uint_as_float(largest << 16), __uint_as_float(largest & 0xFFFF0000u));
  float scale = fmaxf(magnitude, SMALLEST_MAGNITUDE) * (1.0f / LARGEST_E4M3), inverse = __fdividef(1.0f, scale);
#pragma unroll
  for (int box = 0; box < QUERY_BOXES; box++) store_codes(shared, box, row, quarter, values[box], inverse);
  return scale;
}

// Quantizes a piece's 64 queries to e4m3, with a scale for each and zeros after the last head, once no product reads those of
// the piece before. They lie in the ring before the piece's first block. Sets `scale` for the thread's two rows.
template <int CTAS>
__device__ __forceinline__ void take_query(float (&scale)[2], Shared& shared, Ring& ring, int heads, float factor) {
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, stage = ring.stage;
  wait(&shared.full[ring.stage], ring.phase);
  ring.advance();
  wait(&shared.full[ring.stage], ring.phase);
  scorers_meet();
  // Not unrolled, like all code that runs once a piece: fetching code that is not in the instruction cache costs more than it
  // computes.
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    scale[0] = scale[1];
    scale[1] = quantize_row(shared, stage, ring.stage, row + half * 8, row + half * 8 < heads) * factor;
  }
  fence_async_proxy();
  // These stages get no probabilities, but their barriers go on with the ring.
  if (threadIdx.x % 32 == 0) {
    arrive(&shared.probabilities_full[stage]);
    arrive(&shared.probabilities_full[ring.stage]);
  }
  scorers_meet();
  // The value warpgroups, which release the other stages, do not read these.
  if (threadIdx.x % 128 < 2 * CTAS) {
    arrive_at(&shared.empty[stage], threadIdx.x % CTAS);
    arrive_at(&shared.empty[ring.stage], threadIdx.x % CTAS);
  }
  ring.advance();
}
