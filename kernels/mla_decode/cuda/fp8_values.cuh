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

// A block's 64 tokens of V^T for 64 channels.
struct Operands {
  Values first, second;

  template <int M>
  __device__ __forceinline__ void load(u32 tile, int group) {
    Values pairs[2];
    load_pairs<0, M>(pairs[0], tile, group);
    load_pairs<1, M>(pairs[1], tile, group);
    separate(first, pairs[0]);
    separate(second, pairs[1]);
  }
};

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

// Issues V^T P^T over a block's tokens for 64 channels, and does not wait.
__device__ __forceinline__ void multiply_block(float (&sums)[32], const Operands& values, u64 probabilities) {
  wgmma_fence();
  multiply(sums, values.first, probabilities, 0);
  multiply(sums, values.second, further(probabilities, 32), 1);
  wgmma_commit();
}

// Waits for a block's products and adds them up in float32: the tensor cores' own sums have too few bits for many blocks.
__device__ __forceinline__ void add_products(float (&out)[32], float (&sums)[32]) {
  wgmma_wait<0>();
  pin(sums);
#pragma unroll
  for (int i = 0; i < 32; i++) out[i] += sums[i];
  // Before the next products may write the sums.
  pin(out);
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

// Adds all blocks of a piece to `out`. While the products of 64 channels run, the operands of the next 64 are loaded.
template <int CTAS>
__device__ __forceinline__ void add_piece(float (&out)[4][32], Shared& shared, Ring& ring, int blocks, int group) {
  float sums[32];
  Operands even, odd;
  u32 tile = arrived_tile(shared, ring);
  even.load<0>(tile, group);
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    int buffer = ring.buffer(), stage = ring.stage;
    u64 probabilities = descriptor<2>(shared_address(shared.probabilities[buffer]));
    wait(&shared.probabilities_full[buffer], ring.buffer_phase());
    rescale(shared, out, buffer);
    multiply_block(sums, even, probabilities);
    odd.load<1>(tile, group);
    add_products(out[0], sums);
    multiply_block(sums, odd, probabilities);
    even.load<2>(tile, group);
    add_products(out[1], sums);
    multiply_block(sums, even, probabilities);
    odd.load<3>(tile, group);
    release_tile<CTAS>(shared, stage);
    add_products(out[2], sums);
    multiply_block(sums, odd, probabilities);
    bool last = block + 1 == blocks;
    if (!last) {
      ring.next();
      tile = arrived_tile(shared, ring);
      even.load<0>(tile, group);
    }
    add_products(out[3], sums);
    // The caller reads the last block's scales before it releases its buffer.
    if (!last) release_probabilities(shared, buffer);
  }
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
