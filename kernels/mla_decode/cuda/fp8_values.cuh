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
  u32 thread = own_thread() % 128;
  if (thread < CTAS) arrive_at(&shared.empty[stage], thread);
}

// All threads of this value warpgroup meet.
__device__ __forceinline__ void values_meet(int group) { asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory"); }

// Issues V^T P^T over a block's tokens for 64 channels, and does not wait.
__device__ __forceinline__ void multiply_block(float (&sums)[32], const Values& first, const Values& second, u64 probabilities, int more) {
  wgmma_fence();
  multiply(sums, first, probabilities, more);
  multiply(sums, second, further(probabilities, 32), 1);
  wgmma_commit();
}

// Waits for products and adds them up in float32: the tensor cores' own sums have too few bits for many blocks.
__device__ __forceinline__ void add_products(float (&out)[32], float (&sums)[32]) {
  wgmma_wait<0>();
  pin(sums);
#pragma unroll
  for (int i = 0; i < 32; i++) out[i] += sums[i];
  // Read before the next products may write the sums.
  pin(out);
}

__device__ __forceinline__ bool any(uint4 raised) { return raised.x | raised.y | raised.z | raised.w; }

__device__ __forceinline__ void rescale(Shared& shared, float (&out)[4][32], int stage) {
  uint4 raised = shared.raised[stage];
  if (!any(raised)) return;
  const float2* alphas = reinterpret_cast<const float2*>(shared.alpha[stage]) + own_thread() % 4;
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

__device__ __forceinline__ u64 arrived_probabilities(Shared& shared, const Ring& ring) {
  wait(&shared.probabilities_full[ring.stage], ring.phase);
  return descriptor<2>(shared_address(shared.tiles[ring.stage]) + ROPE_OFFSET);
}

// One or two blocks and their probabilities.
struct Blocks {
  u32 tile, next_tile;
  u64 probabilities, next_probabilities;
};

// Adds the blocks for 64 channels, whose operands of the first block have been loaded. Loads those of the next 64 channels' first
// block as soon as products have read theirs, and waits for all products. With the last channels it releases the first of two blocks.
template <int CTAS, int M, bool TWO>
__device__ __forceinline__ void add_channels(
    float (&out)[32], float (&sums)[32], Values (&values)[4], const Blocks& blocks, int group, Shared& shared, int first) {
  multiply_block(sums, values[0], values[1], blocks.probabilities, 0);
  if (TWO) {
    load_values<0, M>(values[2], blocks.next_tile, group);
    load_values<1, M>(values[3], blocks.next_tile, group);
    multiply_block(sums, values[2], values[3], blocks.next_probabilities, 1);
    wgmma_wait<1>();
    if (M == 3) release_tile<CTAS>(shared, first);
  } else {
    wgmma_wait<0>();
  }
  if (M < 3) {
    load_values<0, M + 1>(values[0], blocks.tile, group);
    load_values<1, M + 1>(values[1], blocks.tile, group);
  }
  add_products(out, sums);
}

template <int CTAS, bool TWO>
__device__ __forceinline__ void add_blocks(
    float (&out)[4][32], float (&sums)[32], Values (&values)[4], const Blocks& blocks, int group, Shared& shared, int first) {
  add_channels<CTAS, 0, TWO>(out[0], sums, values, blocks, group, shared, first);
  add_channels<CTAS, 1, TWO>(out[1], sums, values, blocks, group, shared, first);
  add_channels<CTAS, 2, TWO>(out[2], sums, values, blocks, group, shared, first);
  add_channels<CTAS, 3, TWO>(out[3], sums, values, blocks, group, shared, first);
}

// Adds all blocks of a piece to `out`, two at a time: that halves the additions in float32. A block whose probabilities have a
// new reference begins a pair of its own. Leaves the last block's stage to the caller to release.
template <int CTAS>
__device__ __forceinline__ void add_piece(float (&out)[4][32], Shared& shared, Ring& ring, int blocks, int group) {
  float sums[32];
  Values values[4];
#pragma unroll 1
  for (int left = blocks;;) {
    Blocks unit;
    int first = ring.stage;
    unit.tile = arrived_tile(shared, ring);
    load_values<0, 0>(values[0], unit.tile, group);
    load_values<1, 0>(values[1], unit.tile, group);
    unit.probabilities = arrived_probabilities(shared, ring);
    rescale(shared, out, first);
    bool two = false;
    if (left > 1) {
      Ring next = ring;
      next.next();
      unit.next_probabilities = arrived_probabilities(shared, next);
      unit.next_tile = shared_address(shared.tiles[next.stage]);
      two = !any(shared.raised[next.stage]);
      if (two) ring = next;
    }
    if (two) {
      add_blocks<CTAS, true>(out, sums, values, unit, group, shared, first);
    } else {
      add_blocks<CTAS, false>(out, sums, values, unit, group, shared, first);
    }
    left -= two ? 2 : 1;
    if (!left) break;
    release_tile<CTAS>(shared, ring.stage);
    ring.next();
  }
}

// Stores O^T divided by the sum to [heads, 512] bf16. Only the first `rows` heads of the 64 exist. The thread has heads pair * 2
// and pair * 2 + 1 of each 8, and two neighbouring channels of each 64.
__device__ __forceinline__ void store_values(const float (&out)[4][32], const float2 (&inverse)[8], u32* target, int rows, int group) {
  int thread = own_thread(), warp = thread / 32 % 4, lane = thread % 32, pair = lane % 4;
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
