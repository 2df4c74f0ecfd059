// The products and the softmax between them, for 64 rows and two blocks.

#pragma once

#include "fp8_produce.cuh"

// Issues S = Q K^T for one block, and does not wait.
__device__ __forceinline__ void score(float (&scores)[32], u32 query, u32 tile) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < LATENT / 32; step++) {
    u32 offset = (step / 4) * CHUNK_BYTES + (step % 4) * 32;
    multiply(scores, descriptor<1>(query + offset), descriptor<1>(tile + offset), step > 0);
  }
#pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 offset = ROPE_OFFSET + step * 32;
    multiply(scores, descriptor<2>(query + offset), descriptor<2>(tile + offset), 1);
  }
  wgmma_commit();
}

// Loads 32 tokens by 16 channels of each of the warpgroup's four groups of 64 channels, transposed.
__device__ __forceinline__ void load_values(u32 (&values)[4][4], u32 tile, int step, int group) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, token = step * 32 + lane;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    int column = group * 16 + m * 4 + warp;
    u32 address = tile + (column / 8) * CHUNK_BYTES + token * 128 + ((column % 8) ^ (token & 7)) * 16;
    u32 r0, r1, r2, r3;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(address) : "memory");
    values[m][0] = __byte_perm(r0, r1, 0x6420);
    values[m][1] = __byte_perm(r0, r1, 0x7531);
    values[m][2] = __byte_perm(r2, r3, 0x6420);
    values[m][3] = __byte_perm(r2, r3, 0x7531);
  }
}

// Issues O^T += V^T P^T over 32 tokens of one block, and does not wait.
__device__ __forceinline__ void accumulate(float (&out)[4][32], u32 (&values)[4][4], u32 tile, u32 probabilities, int step, int group) {
  load_values(values, tile, step, group);
  wgmma_fence();
#pragma unroll
  for (int m = 0; m < 4; m++) multiply(out[m], values[m], descriptor<2>(probabilities + step * 32));
  wgmma_commit();
}

struct Softmax {
  // For each of the thread's two rows of its warpgroup's scores: the running maximum (log2), this warpgroup's share of the sum,
  // and the factor by which the last unit scaled earlier sums down.
  float largest[2], total[2], alpha[2];
  // The last unit's probabilities, not stored yet: 4 tokens a word, in the permutation's order.
  u32 packed[8];
};

// Turns the unit's scores into probabilities: each warpgroup has one block. The warpgroups meet once.
__device__ __forceinline__ void to_probabilities(
    Shared& shared, float (&scores)[32], Softmax& state, const float (&scale)[2], int tokens, int group) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, pair = lane % 4;
  if (tokens < BLOCK) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      if (i / 4 * 8 + pair * 2 + i % 2 >= tokens) scores[i] = -__int_as_float(0x7F800000);
    }
  }
  float own[2] = {LOWEST, LOWEST}, shift[2];
#pragma unroll
  for (int i = 0; i < 32; i++) own[i / 2 % 2] = fmaxf(own[i / 2 % 2], scores[i]);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    own[half] = fmaxf(own[half], __shfl_xor_sync(~0u, own[half], 1));
    own[half] = fmaxf(own[half], __shfl_xor_sync(~0u, own[half], 2)) * scale[half];
    if (pair == 0) shared.largest[group][row + half * 8] = own[half];
  }
  consumers_meet();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float before = state.largest[half], now = fmaxf(own[half], shared.largest[group ^ 1][row + half * 8]);
    state.largest[half] = now > before + RAISE ? now : before;
    state.alpha[half] = exp2_fast(before - state.largest[half]);
    state.total[half] *= state.alpha[half];
    shift[half] = LOG2_P - state.largest[half];
  }
#pragma unroll
  for (int i = 0; i < 32; i++) {
    scores[i] = exp2_fast(fmaf(scores[i], scale[i / 2 % 2], shift[i / 2 % 2]));
    state.total[i / 2 % 2] += scores[i];
  }
#pragma unroll
  for (int word = 0; word < 8; word++) {
    int i = word / 2 * 8 + word % 2 * 2;
    state.packed[word] = pack_e4m3(scores[i], scores[i + 1]) | pack_e4m3(scores[i + 4], scores[i + 5]) << 16;
  }
  // Nothing reads this store. It depends on all exponentials and so keeps them here, beside the products in flight; the
  // compiler would move them behind the wait for those products.
  if (pair == 0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 address = shared_address(&shared.total[group][row + half * 8]);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(state.total[half]) : "memory");
    }
  }
}

// Stores probabilities in shared memory for both warpgroups, once no product reads those of the unit before. The warpgroups
// meet twice.
__device__ __forceinline__ void store_probabilities(Shared& shared, const Softmax& state, int group) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, pair = lane % 4;
  consumers_meet();
#pragma unroll
  for (int word = 0; word < 8; word++) {
    int head = row + word % 2 * 8;
    u8* target = shared.probabilities[group] + head * 64 + (word / 2 ^ ((head >> 1) & 3)) * 16 + pair * 4;
    *reinterpret_cast<u32*>(target) = state.packed[word];
  }
  if (pair == 0 && group == 0) {
    shared.alpha[row] = state.alpha[0];
    shared.alpha[row + 8] = state.alpha[1];
  }
  fence_async_proxy();
  consumers_meet();
}

__device__ __forceinline__ void rescale(Shared& shared, float (&out)[4][32]) {
  const float2* alphas = reinterpret_cast<const float2*>(shared.alpha) + threadIdx.x % 4;
  float smallest = 1.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) smallest = fminf(smallest, fminf(alphas[i * 4].x, alphas[i * 4].y));
  if (__all_sync(~0u, smallest == 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float2 alpha = alphas[i * 4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
      out[m][i * 4] *= alpha.x;
      out[m][i * 4 + 1] *= alpha.y;
      out[m][i * 4 + 2] *= alpha.x;
      out[m][i * 4 + 3] *= alpha.y;
    }
  }
}

// Stores O^T divided by the sum to [64 heads, 512] bf16 and, for a piece of a split request, the base-2 logarithm of the sum.
template <bool WHOLE_TILES>
__device__ __forceinline__ void finish(
    Shared& shared, const float (&out)[4][32], Softmax& state, float kv_scale, u32* target, float* log_sums, int group) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, pair = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    state.total[half] += __shfl_xor_sync(~0u, state.total[half], 1);
    state.total[half] += __shfl_xor_sync(~0u, state.total[half], 2);
    int head = warp * 16 + lane / 4 + half * 8;
    if (pair == 0) shared.total[group][head] = state.total[half];
    if (pair == 0 && group == 0) shared.largest[0][head] = state.largest[half];
  }
  consumers_meet();
  if (log_sums && threadIdx.x < shared.heads) {
    float total = shared.total[0][threadIdx.x] + shared.total[1][threadIdx.x];
    log_sums[threadIdx.x] = total > 0.0f ? shared.largest[0][threadIdx.x] + __log2f(total) : LOWEST;
  }
  // The thread has heads pair * 2 and pair * 2 + 1 of each 8, and two neighbouring channels of each 64.
  u32* own = target + pair * LATENT + group * 128 + warp * 8 + lane / 4;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int head = i / 2 * 8 + i % 2;
    float total = shared.total[0][head + pair * 2] + shared.total[1][head + pair * 2];
    float inverse = total > 0.0f ? __fdividef(kv_scale, total) : 0.0f;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      int at = i / 2 * 4 + i % 2;
      if (WHOLE_TILES || head + pair * 2 < shared.heads) own[head * (LATENT / 2) + m * 32] = pack_bf16(out[m][at] * inverse, out[m][at + 2] * inverse);
    }
  }
}
