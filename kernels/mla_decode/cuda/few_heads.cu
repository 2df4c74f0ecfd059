// Absorbed attention of one token with up to 32 heads over a paged pool of bf16 latents, for Hopper (sm_90a). Latency limits it:
// 3,500 tokens are 4 MB.
//
// Work. Every CTA takes each GRID-th block of 64 tokens, so that 4,096 tokens are one block a CTA. The tensor cores' 64 rows hold
// the block's tokens for scores (S = K Q^T) and 64 channels for values (O = V^T P^T); heads are the other dimension, so that few of
// them pad nothing. A cluster of four CTAs adds up its values: each CTA sends every other one that one's quarter of the channels,
// and its heads' largest scores and sums. What a cluster made is a piece, which the expanding kernel joins with the others
// (`kernels/mla_projections/cuda/pieces.cu`). Which pieces there are does not depend on the length: no schedule is made.
//
// A CTA copies its first block before it waits. The kernel before writes only the token's own latent, which is copied again.
//
// Bytes: 1,152 a token. FLOPs: 2 * N * (576 + 512) per token.

#include "../../cuda/cluster.cuh"
#include "../../mla_projections/cuda/products.cuh"

constexpr int CTAS = 4, CLUSTERS = 16, GRID = CTAS * CLUSTERS, STAGES = 2;
// A block lies in chunks of 64 rows of 128 bytes (64 channels), swizzled, and so do queries and probabilities.
constexpr int CHUNKS = WIDTH / ELEMENTS, CHUNK_BYTES = BLOCK * LINE, TILES = LATENT / ELEMENTS;
// Tiles of 64 channels that a warpgroup computes, and that a CTA adds up for its cluster, one in each warpgroup.
constexpr int MADE = TILES / 2, OWNED = TILES / CTAS;
// Pieces of 16 bytes of a latent in a block, and of a CTA's channels of a head.
constexpr int ROW_PIECES = WIDTH * 2 / 16, OWNED_PIECES = OWNED * ELEMENTS * 2 / 16;
static_assert(OWNED == 2, "each warpgroup adds up one tile");

struct Arguments {
  // Boxes of 64 rows of the pool and of the kernel's number of heads of the queries, 128 bytes each.
  TensorMap pool_boxes, query_boxes;
  Work work;
  const u8* pool;
  float scale_log2;
};

template <int N>
struct Shared {
  u8 latents[STAGES][CHUNKS][CHUNK_BYTES];
  u8 query[CHUNKS][N * LINE];
  u8 probabilities[N * LINE];
  // What the cluster's CTAs have sent: values of four outputs of 16 heads in bf16, and each head's largest score and sum.
  float4 values[CTAS][OWNED][N / 16][128];
  float largest[CTAS][N], total[CTAS][N];
  // What the scoring warps exchange, and how much earlier sums shrink.
  float warp_largest[4][N], warp_total[4][N], alpha[N];
  u64 full[STAGES], query_full, received;
};

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
template <int N>
struct Attention {
  static constexpr int OWN = N / 4;
  Shared<N>& shared;
  const Arguments& given;
  int rank, cluster;

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ static int head_of(int own) { return own / 2 * 8 + threadIdx.x % 4 * 2 + own % 2; }

  // One thread, before others use the barriers.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < STAGES; stage++) init_barrier(&shared.full[stage], 1);
    init_barrier(&shared.query_full, 1);
    init_barrier(&shared.received, 1);
    fence_barrier_init();
    fence_async_proxy();
    arrive_and_expect(&shared.received, sizeof(shared.values) + sizeof(shared.largest) + sizeof(shared.total));
    prefetch_map(given.query_boxes);
  }

  // One thread.
  __device__ __forceinline__ void copy_block(int stage, int block) const {
    arrive_and_expect(&shared.full[stage], sizeof(shared.latents[stage]));
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      copy_box(shared.latents[stage][chunk], given.pool_boxes, chunk * LINE, given.work.block_table[block] * BLOCK,
               &shared.full[stage]);
  }

  // One thread.
  __device__ __forceinline__ void copy_query() const {
    arrive_and_expect(&shared.query_full, sizeof(shared.query));
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      copy_box(shared.query[chunk], given.query_boxes, chunk * LINE, 0, &shared.query_full);
  }

  __device__ __forceinline__ uint4* piece_at(int stage, int row, int piece) const {
    return reinterpret_cast<uint4*>(shared.latents[stage][piece / 8] + row * LINE + ((piece ^ row) % 8) * 16);
  }

  // All threads, with the context's last block: takes the token's own latent, which may have been written since the block was
  // copied, and clears what follows, which may be NaN.
  __device__ __forceinline__ void mend(int stage, int block, int tokens) const {
    uint4 found = {};
    if (threadIdx.x < ROW_PIECES) {
      long long row = (long long)given.work.block_table[block] * BLOCK + tokens - 1;
      found = load(reinterpret_cast<const uint4*>(given.pool) + row * ROW_PIECES + threadIdx.x);
    }
    for (int at = threadIdx.x; at < (BLOCK - tokens) * ROW_PIECES; at += THREADS)
      *piece_at(stage, tokens + at / ROW_PIECES, at % ROW_PIECES) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < ROW_PIECES) *piece_at(stage, tokens - 1, threadIdx.x) = found;
    fence_async_proxy();
    __syncthreads();
  }

  // The scoring warpgroup: a block's probabilities, relative to the largest score so far.
  __device__ __forceinline__ void score(int stage, int tokens, float (&reference)[OWN], float (&total)[OWN]) const {
    Product<N> scores;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
      u32 latents = shared_address(shared.latents[stage][step / 4]), query = shared_address(shared.query[step / 4]);
      multiply<0>(scores, descriptor<1>(latents + step % 4 * 32), descriptor<1>(query + step % 4 * 32), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores.sum);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      bool hidden = warp() * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4 >= tokens;
      scores.sum[i] = hidden ? LOWEST : scores.sum[i] * given.scale_log2;
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
        multiply<1>(out[tile], descriptor<1>(latents + step * 16 * LINE), descriptor<1>(probabilities + step * 32), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int tile = 0; tile < MADE; tile++) pin(out[tile].sum);
  }

  // The scoring warpgroup: tells all CTAs of the cluster this one's largest scores and sums.
  __device__ __forceinline__ void send_sums(const float (&reference)[OWN], const float (&total)[OWN]) const {
    bool first = threadIdx.x % 32 < 4;
#pragma unroll
    for (int own = 0; own < OWN; own++) {
      float sum = column_sum(total[own]);
      if (first) shared.warp_total[warp()][head_of(own)] = sum;
      if (first && warp() == 0) shared.alpha[head_of(own)] = reference[own];
    }
    scorers_meet();
    for (int at = threadIdx.x; at < CTAS * N; at += 128) {
      int head = at % N;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; i++) sum += shared.warp_total[i][head];
      send(&shared.largest[rank][head], shared.alpha[head], &shared.received, at / N);
      send(&shared.total[rank][head], sum, &shared.received, at / N);
    }
  }

  // Sends each tile to the CTA that adds it up.
  __device__ __forceinline__ void send_values(const Product<N> (&out)[MADE]) const {
#pragma unroll
    for (int tile = 0; tile < MADE; tile++) {
      int at = threadIdx.x / 128 * MADE + tile;
#pragma unroll
      for (int part = 0; part < N / 16; part++) {
        const float* sum = out[tile].sum + part * 8;
        float4 packed = {__uint_as_float(pack_bf16(sum[0], sum[1])), __uint_as_float(pack_bf16(sum[2], sum[3])),
                         __uint_as_float(pack_bf16(sum[4], sum[5])), __uint_as_float(pack_bf16(sum[6], sum[7]))};
        send(&shared.values[rank][at % OWNED][part][threadIdx.x % 128], packed, &shared.received, at / OWNED);
      }
    }
  }

  // Adds up what the cluster's CTAs sent, and stores a quarter of the channels of the cluster's piece.
  __device__ __forceinline__ void store() const {
    constexpr int ROW_BYTES = OWNED * ELEMENTS * 2 + 16;
    int lane = threadIdx.x % 32, tile = threadIdx.x / 128, output = tile * ELEMENTS + warp() * 16 + lane / 8 % 2 * 8;
    // No block is needed any more.
    u8* rows = shared.latents[0][0];
    wait(&shared.received, 0);
#pragma unroll
    for (int part = 0; part < N / 16; part++) {
      float weights[CTAS][4], sums[8] = {};
#pragma unroll
      for (int own = 0; own < 4; own++) weigh(head_of(part * 4 + own), own, weights);
#pragma unroll
      for (int from = 0; from < CTAS; from++) {
        Values found = Values::of(load_shared(&shared.values[from][tile][part][threadIdx.x % 128]));
#pragma unroll
        for (int i = 0; i < 8; i++) sums[i] = fmaf(found.value[i], weights[from][i / 4 * 2 + i % 2], sums[i]);
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
        store_transposed(shared_address(rows) + (part * 16 + j * 8 + lane % 8) * ROW_BYTES + output * 2,
                         pack_bf16(sums[j * 4], sums[j * 4 + 1]), pack_bf16(sums[j * 4 + 2], sums[j * 4 + 3]));
    }
    __syncthreads();
    int heads = given.work.heads;
    uint4* values = reinterpret_cast<uint4*>(given.work.values) + ((long long)cluster * heads * CTAS + rank) * OWNED_PIECES;
    for (int at = threadIdx.x; at < heads * OWNED_PIECES; at += THREADS) {
      int head = at / OWNED_PIECES, piece = at % OWNED_PIECES;
      values[head * CTAS * OWNED_PIECES + piece] = *reinterpret_cast<const uint4*>(rows + head * ROW_BYTES + piece * 16);
    }
    if (rank == 0 && threadIdx.x < heads) store_log_sum(threadIdx.x);
  }

  // By what each CTA's values of a head are multiplied: zero of all if none has seen a token.
  __device__ __forceinline__ void weigh(int head, int own, float (&weights)[CTAS][4]) const {
    float largest = LOWEST, total = 0.0f;
#pragma unroll
    for (int from = 0; from < CTAS; from++) largest = fmaxf(largest, shared.largest[from][head]);
#pragma unroll
    for (int from = 0; from < CTAS; from++) {
      weights[from][own] = exp2_fast(shared.largest[from][head] - largest);
      total = fmaf(weights[from][own], shared.total[from][head], total);
    }
    float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (int from = 0; from < CTAS; from++) weights[from][own] *= inverse;
  }

  __device__ __forceinline__ void store_log_sum(int head) const {
    float largest = LOWEST, total = 0.0f;
    for (int from = 0; from < CTAS; from++) largest = fmaxf(largest, shared.largest[from][head]);
    for (int from = 0; from < CTAS; from++)
      total = fmaf(exp2_fast(shared.largest[from][head] - largest), shared.total[from][head], total);
    given.work.log_sums[cluster * given.work.heads + head] = total > 0.0f ? largest + __log2f(total) : LOWEST;
  }
};

template <int N>
__device__ __forceinline__ void attend(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Attention<N> own{*reinterpret_cast<Shared<N>*>(memory), given, (int)cluster_rank(), (int)blockIdx.x / CTAS};
  Product<N> out[MADE] = {};
  float reference[N / 4], total[N / 4] = {};
#pragma unroll
  for (int i = 0; i < N / 4; i++) reference[i] = LOWEST;
  int length = given.work.lengths[0], blocks = (length + BLOCK - 1) / BLOCK, block = blockIdx.x;
  start_next();
  if (threadIdx.x == 0) own.init();
  if (threadIdx.x == 0 && block < blocks) own.copy_block(0, block);
  cluster_meet();
  wait_for_earlier();
  // A CTA without a block must not end while a copy is on its way.
  if (threadIdx.x == 0 && block < blocks) own.copy_query();
  __syncwarp();
#pragma unroll 1
  for (int turn = 0; block < blocks; turn++, block += GRID) {
    int stage = turn % STAGES, left = length - block * BLOCK;
    if (threadIdx.x == 0 && block + GRID < blocks) own.copy_block((turn + 1) % STAGES, block + GRID);
    __syncwarp();
    wait(&own.shared.full[stage], turn / STAGES & 1);
    wait(&own.shared.query_full, 0);
    if (left <= BLOCK) own.mend(stage, block, left);
    if (threadIdx.x < 128) own.score(stage, left, reference, total);
    fence_async_proxy();
    __syncthreads();
    own.add_values(stage, out, turn == 0);
    // All warps have read the block and the probabilities.
    __syncthreads();
  }
  if (threadIdx.x < 128) own.send_sums(reference, total);
  own.send_values(out);
  own.store();
}

// For up to N heads.
#define ATTEND(N)                                                                                                  \
  extern "C" __device__ int attend_##N##_heads_shared_bytes = sizeof(Shared<N>);                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_##N##_heads(const __grid_constant__ Arguments given) { \
    attend<N>(given);                                                                                              \
  }
ATTEND(16)
ATTEND(32)
