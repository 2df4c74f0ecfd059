// Probabilities times latents, for 64 rows and 256 channels: the role of each of two warpgroups.

#pragma once

#include "fp8_arguments.cuh"

// An operand: 32 tokens of V^T for 64 channels.
using Values = u32[4];

// Loads 32 tokens by 16 channels, transposed, of the warpgroup's M-th group of 64 channels. A token's swizzle is that of the
// token 32 further on, and odd groups lie in the other half of the row.
template <int STEP, int M>
__device__ __forceinline__ void load_pairs(Values& pairs, u32 tile, int group) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  u32 address = tile + group * 2 * CHUNK_BYTES + lane * 128 + (warp ^ (lane & 7)) * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"((M % 2 ? address ^ 64 : address) + M / 2 * CHUNK_BYTES + STEP * 32 * 128) : "memory");
}

// Separates the two channels of each pair.
__device__ __forceinline__ void separate(Values& values, const Values& pairs) {
  values[0] = __byte_perm(pairs[0], pairs[1], 0x6420);
  values[1] = __byte_perm(pairs[0], pairs[1], 0x7531);
  values[2] = __byte_perm(pairs[2], pairs[3], 0x6420);
  values[3] = __byte_perm(pairs[2], pairs[3], 0x7531);
}

template <int STEP, int M>
__device__ __forceinline__ void load_values(Values& values, u32 tile, int group) {
  Values pairs;
  load_pairs<STEP, M>(pairs, tile, group);
  separate(values, pairs);
}

__device__ __forceinline__ u32 arrived_tile(Shared& shared, const Ring& ring) {
  wait(&shared.full[ring.stage], ring.phase);
  return shared_address(shared.tiles[ring.stage]);
}

// Tells all CTAs of the cluster, one thread each, that this warpgroup has read the stage.
template <int CTAS>
__device__ __forceinline__ void release_tile(Shared& shared, int stage) {
  if (threadIdx.x % 128 < CTAS) arrive_at(&shared.empty[stage], threadIdx.x % 128);
}

__device__ __forceinline__ void release_probabilities(Shared& shared, int buffer) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(&shared.probabilities_empty[buffer]);
}

__device__ __forceinline__ void pin_all(float (&out)[4][32]) {
#pragma unroll
  for (int m = 0; m < 4; m++) pin(out[m]);
}

// Issues O^T += V^T P^T over 32 tokens for a group of 64 channels, and does not wait.
__device__ __forceinline__ void accumulate(float (&out)[32], const Values& values, u64 probabilities) {
  wgmma_fence();
  multiply(out, values, probabilities);
  wgmma_commit();
}

__device__ __forceinline__ void rescale(Shared& shared, float (&out)[4][32], int buffer) {
  uint4 raised = shared.raised[buffer];
  if (!(raised.x | raised.y | raised.z | raised.w)) return;
  const float2* alphas = reinterpret_cast<const float2*>(shared.alpha[buffer]) + threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    // Heads 16 * w to 16 * w + 15 are those of scoring warp w, which stores factors only if one is not one.
    u32 stored = i / 2 == 0 ? raised.x : i / 2 == 1 ? raised.y : i / 2 == 2 ? raised.z : raised.w;
    float2 alpha = stored ? alphas[i * 4] : make_float2(1.0f, 1.0f);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      out[m][i * 4] *= alpha.x;
      out[m][i * 4 + 1] *= alpha.y;
      out[m][i * 4 + 2] *= alpha.x;
      out[m][i * 4 + 3] *= alpha.y;
    }
  }
}

// Loads the next operand, puts it in the place of the oldest of the four in flight once that has been read, and multiplies.
template <int M>
__device__ __forceinline__ void replace(float (&out)[4][32], Values (&values)[4], u32 tile, u64 probabilities, int group) {
  Values pairs;
  load_pairs<1, M>(pairs, tile, group);
  wgmma_wait<3>();
  separate(values[M], pairs);
  accumulate(out[M], values[M], probabilities);
}

// Waits for the block's probabilities and issues its products. The operands of the first 32 tokens have been loaded. Leaves the
// last four products in flight.
__device__ __forceinline__ void add_block(float (&out)[4][32], Shared& shared, Values (&values)[4], const Ring& ring, int group) {
  int buffer = ring.buffer();
  u32 tile = shared_address(shared.tiles[ring.stage]);
  u64 first = descriptor<2>(shared_address(shared.probabilities[buffer])), second = further(first, 32);
  wait(&shared.probabilities_full[buffer], ring.buffer_phase());
  rescale(shared, out, buffer);
  pin_all(out);
#pragma unroll
  for (int m = 0; m < 4; m++) accumulate(out[m], values[m], first);
  replace<0>(out, values, tile, second, group);
  replace<1>(out, values, tile, second, group);
  replace<2>(out, values, tile, second, group);
  replace<3>(out, values, tile, second, group);
}

// Adds all blocks of a piece. Leaves the last block's probabilities to the caller to release.
template <int CTAS>
__device__ __forceinline__ void add_piece(float (&out)[4][32], Shared& shared, Ring& ring, int blocks, int group) {
  Values values[4];
  u32 tile = arrived_tile(shared, ring);
  load_values<0, 0>(values[0], tile, group);
  load_values<0, 1>(values[1], tile, group);
  load_values<0, 2>(values[2], tile, group);
  load_values<0, 3>(values[3], tile, group);
#pragma unroll 1
  for (int block = 0; block < blocks - 1; block++) {
    add_block(out, shared, values, ring, group);
    int stage = ring.stage, buffer = ring.buffer();
    ring.next();
    tile = arrived_tile(shared, ring);
    wgmma_wait<3>();
    load_values<0, 0>(values[0], tile, group);
    wgmma_wait<2>();
    load_values<0, 1>(values[1], tile, group);
    wgmma_wait<1>();
    load_values<0, 2>(values[2], tile, group);
    wgmma_wait<0>();
    pin_all(out);
    release_tile<CTAS>(shared, stage);
    release_probabilities(shared, buffer);
    load_values<0, 3>(values[3], tile, group);
  }
  add_block(out, shared, values, ring, group);
  wgmma_wait<0>();
  pin_all(out);
  release_tile<CTAS>(shared, ring.stage);
}

// Stores O^T divided by the sum to [heads, 512] bf16. Only the first `rows` heads of the 64 exist. The thread has heads pair * 2
// and pair * 2 + 1 of each 8, and two neighbouring channels of each 64.
__device__ __forceinline__ void store_values(const float (&out)[4][32], const float2 (&inverse)[8], u32* target, int rows, int group) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, pair = lane % 4;
  u32* own = target + pair * LATENT + group * 128 + warp * 8 + lane / 4;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int head = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
    float factor = i % 2 ? inverse[i / 2].y : inverse[i / 2].x;
    if (head + pair * 2 >= rows) continue;
#pragma unroll
    for (int m = 0; m < 4; m++) own[head * (LATENT / 2) + m * 32] = pack_bf16(out[m][at] * factor, out[m][at + 2] * factor);
  }
}
