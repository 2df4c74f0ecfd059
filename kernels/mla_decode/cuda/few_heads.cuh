// Attention of one query of each request with up to 32 heads, block by block, for Hopper (sm_90a). The tensor cores' 64 rows hold
// a block's tokens for scores (S = K Q^T) and 64 channels for values (O = V^T P^T); heads are the other dimension, so that few of
// them pad nothing.

#pragma once

#include "../../cuda/bf16_products.cuh"
#include "../../cuda/cluster.cuh"
#include "../../cuda/values.cuh"
#include "parts.cuh"

constexpr int THREADS = 256;
// A block lies in chunks of 64 rows of 128 bytes (64 channels), swizzled, and so do queries and probabilities.
constexpr int ELEMENTS = 64, LINE = 128;
constexpr int STAGES = 2, CHUNKS = WIDTH / ELEMENTS, CHUNK_BYTES = BLOCK * LINE, TILES = LATENT / ELEMENTS;
// Tiles of 64 channels that a warpgroup computes.
constexpr int MADE = TILES / 2;
// Pieces of 16 bytes of a latent in a block.
constexpr int ROW_PIECES = WIDTH * 2 / 16;

struct Arguments {
  // Boxes of 64 rows of the pool and of the kernel's number of heads of the queries, 128 bytes each.
  TensorMap pool_boxes, query_boxes;
  Work work;
  const u8* pool;
  float scale_log2;
  // See `is_ready`.
  int written;
};

// A thread's sums of 64 rows by N heads (`multiply_step`).
template <int N>
struct Product {
  float sum[N / 2];
};

// QUERIES: how many queries there is room for at once.
template <int N, int QUERIES>
struct Buffers {
  u8 latents[STAGES][CHUNKS][CHUNK_BYTES];
  u8 query[QUERIES][CHUNKS][N * LINE];
  u8 probabilities[N * LINE];
  // What the scoring warps exchange, and how much earlier sums shrink.
  float warp_largest[4][N], warp_total[4][N], alpha[N];
  u64 full[STAGES], query_full[QUERIES];
};

// Whether a context's block may be copied before earlier kernels have ended. written: how many of its last tokens they may still
// write; `mend` takes a single one again.
__device__ __forceinline__ bool is_ready(int block, int length, int written) {
  return written == 1 || (block + 1) * BLOCK <= length - written;
}

__device__ __forceinline__ void scorers_meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Sums and maxima over the rows that a warp has of a product's column: all lanes get them.
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ __forceinline__ float column_largest(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// A thread has the heads j * 8 + lane % 4 * 2 + i of all products: those with the index j * 2 + i.
template <int N, int QUERIES>
struct Attention {
  static constexpr int OWN = N / 4;
  Buffers<N, QUERIES>& shared;
  // Boxes of 64 rows of the pool and of the kernel's number of heads of the queries, 128 bytes each.
  const TensorMap &pool_boxes, &query_boxes;
  const u8* pool;
  float scale_log2;

  __device__ __forceinline__ static int warp() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ static int head_of(int own) { return own / 2 * 8 + threadIdx.x % 4 * 2 + own % 2; }

  // One thread, before others use the barriers.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < STAGES; stage++) init_barrier(&shared.full[stage], 1);
    for (int query = 0; query < QUERIES; query++) init_barrier(&shared.query_full[query], 1);
    prefetch_map(query_boxes);
  }

  // One thread. place: the block's in the pool.
  __device__ __forceinline__ void copy_block(int stage, int place) const {
    arrive_and_expect(&shared.full[stage], sizeof(shared.latents[stage]));
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      copy_box(shared.latents[stage][chunk], pool_boxes, chunk * LINE, place * BLOCK, &shared.full[stage]);
  }

  // One thread. row: of the first head.
  __device__ __forceinline__ void copy_query(int query, int row) const {
    arrive_and_expect(&shared.query_full[query], sizeof(shared.query[query]));
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      copy_box(shared.query[query][chunk], query_boxes, chunk * LINE, row, &shared.query_full[query]);
  }

  __device__ __forceinline__ uint4* piece_at(int stage, int row, int piece) const {
    return reinterpret_cast<uint4*>(shared.latents[stage][piece / 8] + row * LINE + ((piece ^ row) % 8) * 16);
  }

  // All threads, with the context's last block: takes the token's own latent, which may have been written since the block was
  // copied, and clears what follows, which may be NaN.
  __device__ __forceinline__ void mend(int stage, int place, int tokens) const {
    uint4 found = {};
    if (threadIdx.x < ROW_PIECES) {
      long long row = (long long)place * BLOCK + tokens - 1;
      found = load(reinterpret_cast<const uint4*>(pool) + row * ROW_PIECES + threadIdx.x);
    }
    for (int at = threadIdx.x; at < (BLOCK - tokens) * ROW_PIECES; at += THREADS)
      *piece_at(stage, tokens + at / ROW_PIECES, at % ROW_PIECES) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < ROW_PIECES) *piece_at(stage, tokens - 1, threadIdx.x) = found;
    fence_async_proxy();
    __syncthreads();
  }

  // The scoring warpgroup: a block's probabilities, relative to the largest score so far.
  __device__ __forceinline__ void score(int stage, int of, int tokens, float (&reference)[OWN], float (&total)[OWN]) const {
    Product<N> scores;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
      u32 latents = shared_address(shared.latents[stage][step / 4]), query = shared_address(shared.query[of][step / 4]);
      multiply_step(scores.sum, descriptor<1>(latents + step % 4 * 32), descriptor<1>(query + step % 4 * 32), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores.sum);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      bool hidden = warp() * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4 >= tokens;
      scores.sum[i] = hidden ? LOWEST : scores.sum[i] * scale_log2;
    }
    raise(scores, reference, total);
    store_probabilities(scores, reference, total);
  }

  __device__ __forceinline__ void raise(const Product<N>& scores, float (&reference)[OWN], float (&total)[OWN]) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int own = 0; own < OWN; own++) {
      int at = own / 2 * 4 + own % 2;
      float largest = column_largest(fmaxf(scores.sum[at], scores.sum[at + 2]));
      if (lane < 4) shared.warp_largest[warp()][head_of(own)] = largest;
    }
    scorers_meet();
#pragma unroll
    for (int own = 0; own < OWN; own++) {
      float before = reference[own];
#pragma unroll
      for (int i = 0; i < 4; i++) reference[own] = fmaxf(reference[own], shared.warp_largest[i][head_of(own)]);
      float alpha = exp2_fast(before - reference[own]);
      total[own] *= alpha;
      if (warp() == 0 && lane < 4) shared.alpha[head_of(own)] = alpha;
    }
  }

  // Stores them with a head's tokens contiguous, and sums them.
  __device__ __forceinline__ void store_probabilities(const Product<N>& scores, const float (&reference)[OWN], float (&total)[OWN]) const {
    int lane = threadIdx.x % 32, eight = warp() * 2 + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      float made[4];
#pragma unroll
      for (int i = 0; i < 4; i++) made[i] = exp2_fast(scores.sum[j * 4 + i] - reference[j * 2 + i % 2]);
      total[j * 2] += made[0] + made[2];
      total[j * 2 + 1] += made[1] + made[3];
      int head = j * 8 + lane % 8;
      store_transposed(shared_address(shared.probabilities) + head * LINE + (eight ^ (head & 7)) * 16,
                       pack_bf16(made[0], made[1]), pack_bf16(made[2], made[3]));
    }
  }

  // A warpgroup's half of the channels.
  __device__ __forceinline__ void add_values(int stage, Product<N> (&out)[MADE], bool first) const {
    if (!first) {
      float alpha[OWN];
#pragma unroll
      for (int own = 0; own < OWN; own++) alpha[own] = shared.alpha[head_of(own)];
#pragma unroll
      for (int tile = 0; tile < MADE; tile++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) out[tile].sum[i] *= alpha[i / 4 * 2 + i % 2];
    }
    u32 probabilities = shared_address(shared.probabilities);
#pragma unroll
    for (int tile = 0; tile < MADE; tile++) pin(out[tile].sum);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < MADE; tile++) {
      u32 latents = shared_address(shared.latents[stage][threadIdx.x / 128 * MADE + tile]);
#pragma unroll
      for (int step = 0; step < BLOCK / 16; step++)
        multiply_step<1>(out[tile].sum, descriptor<1>(latents + step * 16 * LINE), descriptor<1>(probabilities + step * 32), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int tile = 0; tile < MADE; tile++) pin(out[tile].sum);
  }

};
