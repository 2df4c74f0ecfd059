// Scores and softmax of 64 rows and a block: the role of one warpgroup.

#pragma once

#include "bf16_products.cuh"

// Probabilities are taken relative to an earlier block's largest score. Only if a thread's sum of 16 probabilities shows that
// this block's scores are far above it, and for the first block, a maximum is taken and the earlier sums are scaled down.
constexpr float LARGEST_SUM = 1024.0f;
constexpr int SCORE_THREADS = 128;

__device__ __forceinline__ void scorers_meet() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

__device__ __forceinline__ bool arrived(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}" : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}

struct Query {
  // The held chunks as a first operand: a thread has two rows and four channels of each 16.
  u32 held[HELD_CHUNKS][4][4];
};

__device__ __forceinline__ void multiply_chunk(
    float (&scores)[32], Shared& shared, const Query& query, int chunk, u64 latents, bool first) {
  u64 stored = descriptor<1>(shared_address(shared.query));
#pragma unroll
  for (int step = 0; step < CHUNK / 16; step++) {
    if (chunk < CHUNKS - HELD_CHUNKS)
      multiply_bf16(scores, stored + (chunk * CHUNK_BYTES + step * 32) / 16, latents + step * 2, !first || step > 0);
    else
      multiply_bf16(scores, query.held[chunk - (CHUNKS - HELD_CHUNKS)][step], latents + step * 2, !first || step > 0);
  }
}

// Issues S = Q K^T for one block as it arrives, and does not wait. `ready`: the block's first pair has arrived. GATHERED: threads
// have copied the block, whose writes the tensor cores see only after a fence.
template <bool GATHERED>
__device__ __forceinline__ void score(
    float (&scores)[32], Shared& shared, const Query& query, const RingPosition& ring, bool ready) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    int slot = ring.slot_of(i);
    u64 latents = descriptor<1>(shared_address(shared.latents[slot]));
    if (i > 0 || !ready) wait(&shared.full[slot], ring.phase_of(i));
    if (GATHERED) fence_async_proxy();
    wgmma_fence();
    multiply_chunk(scores, shared, query, 2 * pair_at(i), latents, i == 0);
    multiply_chunk(scores, shared, query, 2 * pair_at(i) + 1, latents + CHUNK_BYTES / 16, false);
  }
  wait(&shared.key_full, ring.count & 1);
  if (GATHERED) fence_async_proxy();
  wgmma_fence();
  multiply_chunk(scores, shared, query, CHUNKS - 1, descriptor<1>(shared_address(shared.key)), false);
  wgmma_commit();
}

__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

// Loads a query's held chunks from the ring, where they lie before the piece's first block.
template <int CTAS>
__device__ __forceinline__ void take_held(Query& query, Shared& shared, RingPosition& ring) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int chunk = 0; chunk < HELD_CHUNKS; chunk++) {
    int slot = ring.slot_of(chunk / 2);
    u32 base = shared_address(shared.latents[slot]) + chunk % 2 * CHUNK_BYTES + row * 128;
    if (chunk % 2 == 0) wait(&shared.full[slot], ring.phase_of(chunk / 2));
#pragma unroll
    for (int step = 0; step < 4; step++)
      load_matrices(query.held[chunk][step], base + ((step * 2 + lane / 16) ^ (row & 7)) * 16);
  }
  scorers_meet();
#pragma unroll
  for (int i = 0; i < HELD_PAIRS; i++) release<CTAS>(&shared.empty[ring.slot_of(i)]);
  ring.skip(HELD_PAIRS);
}

struct Softmax {
  // For each of the thread's two rows: the score that probabilities are relative to (log2), the thread's share of their sum,
  // and the factor by which the last block scaled earlier sums down.
  float reference[2], total[2], alpha[2];
};

// Four 8 x 8 matrices: 16 tokens of the first 8 and of the last 8 of the warp's 16 rows.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Stores probabilities in shared memory, 16 tokens at a time, and sums them.
__device__ __forceinline__ void exponentiate(
    const float (&scores)[32], const Softmax& state, float scale, float (&sum)[2], u8 (&target)[CHUNK_BYTES]) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  u32 base = shared_address(target) + row * 128;
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int step = 0; step < 4; step++) {
    u32 packed[4];
#pragma unroll
    for (int word = 0; word < 4; word++) {
      int half = word % 2, at = step * 8 + word * 2;
      float low = exp2_fast(fmaf(scores[at], scale, -state.reference[half]));
      float high = exp2_fast(fmaf(scores[at + 1], scale, -state.reference[half]));
      sum[half] += low + high;
      packed[word] = pack_bf16(low, high);
    }
    store_matrices(base + ((step * 2 + lane / 16) ^ (row & 7)) * 16, packed);
  }
}

// Makes the largest score so far the reference.
__device__ __forceinline__ void raise_reference(const float (&scores)[32], Softmax& state, float scale) {
  float largest[2] = {LOWEST, LOWEST};
#pragma unroll
  for (int i = 0; i < 32; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2)) * scale;
    float before = state.reference[half];
    state.reference[half] = fmaxf(before, largest[half]);
    state.alpha[half] = exp2_fast(before - state.reference[half]);
  }
}

// Clears the latents after the request's last token: they may be NaN, which a probability of zero would not cancel.
__device__ __forceinline__ void clear_rest(Shared& shared, const RingPosition& ring, int tokens) {
  int chunk = threadIdx.x % SCORE_THREADS / 16, column = threadIdx.x % 8 * 16;
  u8* target = shared.latents[ring.slot_of(chunk / 2)] + chunk % 2 * CHUNK_BYTES + column;
  for (int token = tokens + threadIdx.x / 8 % 2; token < BLOCK; token += 2)
    *reinterpret_cast<uint4*>(target + token * 128) = make_uint4(0, 0, 0, 0);
}

// Turns a block's scores, of which the first `tokens` count, into probabilities in shared memory.
__device__ __forceinline__ void to_probabilities(float (&scores)[32], Softmax& state, Shared& shared, float scale, int tokens, int count) {
  // `tokens` is signed: a causal mask may hide more tokens than the block has.
  int pair = threadIdx.x % 4, buffer = count & 1;
  if (tokens < BLOCK) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      if (i / 4 * 8 + pair * 2 + i % 2 >= tokens) scores[i] = -__int_as_float(0x7F800000);
    }
  }
  float sum[2];
  exponentiate(scores, state, scale, sum, shared.probabilities[buffer]);
  state.alpha[0] = state.alpha[1] = 1.0f;
  if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > LARGEST_SUM)) {
    raise_reference(scores, state, scale);
    exponentiate(scores, state, scale, sum, shared.probabilities[buffer]);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) state.total[half] = state.total[half] * state.alpha[half] + sum[half];
}

// Stores the factors by which earlier sums shrink and, after a piece's last block, its sums.
__device__ __forceinline__ void store_sums(Shared& shared, Softmax& state, int count, bool last) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, buffer = count & 1;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int own = warp * 16 + lane / 4 + half * 8;
    if (lane % 4 == 0) shared.alpha[buffer][own] = state.alpha[half];
    if (last) {
      state.total[half] += __shfl_xor_sync(~0u, state.total[half], 1);
      state.total[half] += __shfl_xor_sync(~0u, state.total[half], 2);
      bool any = state.total[half] > 0.0f;
      if (lane % 4 == 0) shared.inverse[buffer][own] = any ? __fdividef(1.0f, state.total[half]) : 0.0f;
      if (lane % 4 == 0) shared.log_sum[buffer][own] = any ? state.reference[half] + __log2f(state.total[half]) : LOWEST;
    }
  }
}

// Publishes the probabilities. One lane arrives for its warp: __syncwarp orders the other lanes' stores before it, which
// racecheck does not see.
__device__ __forceinline__ void publish(Shared& shared, int count) {
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(&shared.probabilities_full[count & 1]);
}
