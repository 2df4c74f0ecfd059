// Scores and softmax of 64 rows and a block: the role of one warpgroup.

#pragma once

#include "fp8_query.cuh"

// Probabilities are stored 16 times as large, so that e4m3's smallest steps are far below the largest one. They are relative to
// an earlier block's largest score. Only if a thread's sum of 16 shows that one may exceed e4m3's largest number, a maximum is
// taken again and the earlier sums are scaled down.
constexpr float LOG2_P = 4.0f, LARGEST_SUM = LARGEST_E4M3;

__device__ __forceinline__ bool arrived(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}" : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}

// Publishes the probabilities. One lane arrives for its warp: __syncwarp orders the other lanes' stores before it.
__device__ __forceinline__ void publish(Shared& shared, int stage) {
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(&shared.probabilities_full[stage]);
}

// Waits for a block's scores, and tells the other scoring warps that this one's products have read its keys.
__device__ __forceinline__ void await_scores(float (&scores)[32], Shared& shared, const Ring& ring) {
  wgmma_wait<0>();
  pin(scores);
  if (threadIdx.x % 32 == 0) arrive(&shared.scored[ring.count & 1]);
}

// Issues S = Q K^T for one block, and does not wait.
__device__ __forceinline__ void score(float (&scores)[32], Shared& shared, const Ring& ring) {
  u32 tile = shared_address(shared.tiles[ring.stage]), query = shared_address(shared.query);
  u64 latents = descriptor<1>(tile), keys = descriptor<2>(tile + ROPE_OFFSET);
  u64 query_latents = descriptor<1>(query), query_keys = descriptor<2>(query + ROPE_OFFSET);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < LATENT / 32; step++) {
    u32 offset = (step / 4) * CHUNK_BYTES + (step % 4) * 32;
    multiply(scores, further(query_latents, offset), further(latents, offset), step > 0);
  }
#pragma unroll
  for (int step = 0; step < 2; step++) multiply(scores, further(query_keys, step * 32), further(keys, step * 32), 1);
  wgmma_commit();
}

struct Softmax {
  // For each of the thread's two rows: the score that probabilities are relative to (log2), the thread's share of their sum,
  // and the factor by which the last block scaled earlier sums down.
  float reference[2], total[2], alpha[2];
};

// Packs probabilities, 4 tokens a word, in the order of `load_values`, and sums them.
__device__ __forceinline__ void exponentiate(
    const float (&scores)[32], const Softmax& state, const float (&scale)[2], float (&sum)[2], u32 (&packed)[8]) {
  float shift[2] = {LOG2_P - state.reference[0], LOG2_P - state.reference[1]};
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int word = 0; word < 8; word++) {
    int half = word % 2, at = word / 2 * 8 + half * 2;
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = exp2_fast(fmaf(scores[at + i / 2 * 4 + i % 2], scale[half], shift[half]));
    sum[half] += (p[0] + p[1]) + (p[2] + p[3]);
    packed[word] = pack_e4m3(p[0], p[1]) | pack_e4m3(p[2], p[3]) << 16;
  }
}

// Makes the largest score so far the reference.
__device__ __forceinline__ void raise_reference(const float (&scores)[32], Softmax& state, const float (&scale)[2]) {
  float largest[2] = {LOWEST, LOWEST};
#pragma unroll
  for (int i = 0; i < 32; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2)) * scale[half];
    float before = state.reference[half];
    state.reference[half] = fmaxf(before, largest[half]);
    state.alpha[half] = exp2_fast(before - state.reference[half]);
  }
}

// Stores them over the block's rope keys, once no warp's products read these.
__device__ __forceinline__ void store_probabilities(Shared& shared, const u32 (&packed)[8], const Ring& ring) {
  wait(&shared.scored[ring.count & 1], ring.count / 2 & 1);
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, pair = lane % 4;
#pragma unroll
  for (int word = 0; word < 8; word++) {
    int head = row + word % 2 * 8;
    u8* target = shared.tiles[ring.stage] + ROPE_OFFSET + head * 64 + (word / 2 ^ ((head >> 1) & 3)) * 16 + pair * 4;
    *reinterpret_cast<u32*>(target) = packed[word];
  }
}

// Turns a block's scores, of which the first `tokens` count, into probabilities in shared memory. `tokens` may be negative: a
// causal mask may hide more tokens than the block has.
__device__ __forceinline__ void to_probabilities(
    float (&scores)[32], Softmax& state, Shared& shared, const float (&scale)[2], int tokens, const Ring& ring) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, pair = lane % 4;
  if (tokens < BLOCK) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      if (i / 4 * 8 + pair * 2 + i % 2 >= tokens) scores[i] = -__int_as_float(0x7F800000);
    }
  }
  float sum[2];
  u32 packed[8];
  exponentiate(scores, state, scale, sum, packed);
  bool raised = __any_sync(~0u, fmaxf(sum[0], sum[1]) > LARGEST_SUM);
  state.alpha[0] = state.alpha[1] = 1.0f;
  if (raised) {
    raise_reference(scores, state, scale);
    exponentiate(scores, state, scale, sum, packed);
    if (pair == 0) {
      shared.alpha[ring.stage][warp * 16 + lane / 4] = state.alpha[0];
      shared.alpha[ring.stage][warp * 16 + lane / 4 + 8] = state.alpha[1];
    }
  }
  if (lane == 0) reinterpret_cast<u32*>(&shared.raised[ring.stage])[warp] = raised;
  store_probabilities(shared, packed, ring);
#pragma unroll
  for (int half = 0; half < 2; half++) state.total[half] = state.total[half] * state.alpha[half] + sum[half];
}

// After a piece's last block: stores what its sums are divided by and, if the request is split, their logarithms.
__device__ __forceinline__ void store_sums(Shared& shared, Softmax& state, float kv_scale, float* log_sums, int rows, int stage) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = state.total[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    int own = row + half * 8;
    bool any = total > 0.0f;
    if (lane % 4) continue;
    shared.inverse[stage][own] = any ? __fdividef(kv_scale, total) : 0.0f;
    if (log_sums && own < rows) log_sums[own] = any ? state.reference[half] + __log2f(total) : LOWEST;
  }
}
