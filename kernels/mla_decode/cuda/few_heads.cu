// Absorbed attention of one token with up to 32 heads over a paged pool of bf16 latents, for Hopper (sm_90a). Latency limits it:
// 3,500 tokens are 4 MB.
//
// Work. Every CTA takes each GRID-th block of 64 tokens, so that 4,096 tokens are one block a CTA. The tensor cores' 64 rows hold
// the block's tokens for scores (S = K Q^T) and 64 channels for values (O = V^T P^T); heads are the other dimension, so that few of
// them pad nothing. A cluster of four CTAs adds up its values: each CTA sends every other one that one's quarter of the channels,
// and its heads' largest scores and sums. What a cluster made is a piece, which the expanding kernel joins with the others
// (`kernels/mla_projections/cuda/pieces.cu`). Which pieces there are does not depend on the length: no schedule is made.
//
// A CTA copies its first block before it waits, unless earlier kernels may still write more of it than the token's own latent, which
// is copied again.
//
// Bytes: 1,152 a token. FLOPs: 2 * N * (576 + 512) per token.

#include "few_heads.cuh"

constexpr int CTAS = 4, CLUSTERS = 16, GRID = CTAS * CLUSTERS;
// Tiles of channels that a CTA adds up for its cluster, one in each warpgroup, and pieces of 16 bytes of its channels of a head.
constexpr int OWNED = TILES / CTAS, OWNED_PIECES = OWNED * ELEMENTS * 2 / 16;
static_assert(OWNED == 2, "each warpgroup adds up one tile");

template <int N>
struct Shared : Buffers<N, 1> {
  // What the cluster's CTAs have sent: values of four outputs of 16 heads in bf16, and each head's largest score and sum.
  float4 values[CTAS][OWNED][N / 16][128];
  float largest[CTAS][N], total[CTAS][N];
  u64 received;
};

template <int N>
struct ClusterAttention : Attention<N, 1> {
  using Base = Attention<N, 1>;
  using Base::head_of;
  using Base::OWN;
  using Base::warp;
  Shared<N>& shared;
  const Arguments& given;
  int rank, cluster;

  __device__ __forceinline__ ClusterAttention(Shared<N>& shared, const Arguments& given)
      : Base{shared, given.pool_boxes, given.query_boxes, given.pool, given.scale_log2},
        shared(shared), given(given), rank((int)cluster_rank()), cluster((int)blockIdx.x / CTAS) {}

  // One thread, before others use the barriers.
  __device__ __forceinline__ void init() const {
    Base::init();
    init_barrier(&shared.received, 1);
    fence_barrier_init();
    fence_async_proxy();
    arrive_and_expect(&shared.received, sizeof(shared.values) + sizeof(shared.largest) + sizeof(shared.total));
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
  ClusterAttention<N> own(*reinterpret_cast<Shared<N>*>(memory), given);
  Product<N> out[MADE] = {};
  float reference[N / 4], total[N / 4] = {};
#pragma unroll
  for (int i = 0; i < N / 4; i++) reference[i] = LOWEST;
  int length = given.work.lengths[0], blocks = (length + BLOCK - 1) / BLOCK, block = blockIdx.x;
  const int* table = given.work.block_table;
  start_next();
  if (threadIdx.x == 0) own.init();
  bool early = is_ready(block, length, given.written);
  if (threadIdx.x == 0 && block < blocks && early) own.copy_block(0, table[block]);
  cluster_meet();
  wait_for_earlier();
  if (threadIdx.x == 0 && block < blocks && !early) own.copy_block(0, table[block]);
  // A CTA without a block must not end while a copy is on its way.
  if (threadIdx.x == 0 && block < blocks) own.copy_query(0, 0);
  __syncwarp();
#pragma unroll 1
  for (int turn = 0; block < blocks; turn++, block += GRID) {
    int stage = turn % STAGES, left = length - block * BLOCK;
    if (threadIdx.x == 0 && block + GRID < blocks) own.copy_block((turn + 1) % STAGES, table[block + GRID]);
    __syncwarp();
    wait(&own.shared.full[stage], turn / STAGES & 1);
    wait(&own.shared.query_full[0], 0);
    if (left <= BLOCK) own.mend(stage, table[block], left);
    if (threadIdx.x < 128) own.score(stage, 0, left, reference, total);
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
