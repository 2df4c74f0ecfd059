// The lightning indexer's scores over a paged pool of e4m3 keys, products in FP8, for Hopper (sm_90a): of rows of few queries.
//
// Two CTAs run on a multiprocessor. Roles in a CTA: one warp copies blocks and queries. Two warpgroups take every other unit
// each. Keys are the rows of a product and its first operand, in registers: so a stage is free once they are loaded, shared
// memory is read for queries alone, and a key's heads are in four threads, which add them up without shared memory. While one
// warpgroup adds, others have the tensor cores.
//
// Bytes: 132 a key, once for decode; 4 a score. FLOPs: 2 * 64 * 128 for each key and query of 64 heads, at least 128 cycles a block
// and query, when a multiprocessor's share of memory's bandwidth brings a block in 466. Sums of 128 products are the tensor cores'
// own, as in the published kernels; those of heads are in float32.

#include "copies.cuh"

constexpr int STAGES = 8, SCORERS = 2, THREADS = SCORERS * 128 + 32, CTAS = 2;

template <int HEADS>
using Decoding = Shared<HEADS, STAGES, 1, SCORERS, 1>;

// A first operand: 64 keys by 32 values.
using Keys = u32[WIDTH / 32][4];

__device__ __forceinline__ void load_keys(Keys& keys, const u8* stage) {
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  u32 base = shared_address(stage) + row * 128;
#pragma unroll
  for (int step = 0; step < WIDTH / 32; step++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(keys[step][0]), "=r"(keys[step][1]), "=r"(keys[step][2]), "=r"(keys[step][3])
                 : "r"(base + ((step * 2 + lane / 16) ^ (row & 7)) * 16) : "memory");
}

// The products of 64 keys and 64 heads, of one query or of two. The thread has two keys, 8 apart, and two heads of each 8.
__device__ __forceinline__ void multiply_heads(float (&products)[32], const Keys& keys, const u8* query) {
  u64 heads = descriptor<1>(shared_address(query));
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < WIDTH / 32; step++) multiply(products, keys[step], heads + step * 2, step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(products);
}

// The weighted sum over the heads of the product's query `at`, for the first of the thread's keys in even threads and for the
// second in odd ones.
template <int HEADS>
__device__ __forceinline__ float add_heads(const float (&products)[32], int at, const float* weights) {
  const float2* own = reinterpret_cast<const float2*>(weights) + threadIdx.x % 4;
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < HEADS / 8; i++) {
    float2 weight = own[i * 4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int first = at * (HEADS / 2) + i * 4 + half * 2;
      sum[half] = fmaf(fmaxf(products[first], 0.0f), weight.x, sum[half]);
      sum[half] = fmaf(fmaxf(products[first + 1], 0.0f), weight.y, sum[half]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
  }
  return threadIdx.x % 2 ? sum[1] : sum[0];
}

// A warpgroup: scores every other unit of this CTA. Scores after a row's last token are written and mean nothing.
template <int HEADS>
__device__ __forceinline__ void score(Decoding<HEADS>& shared, const Arguments& given, int scorer) {
  int lane = threadIdx.x % 32, pair = lane % 4, key = threadIdx.x / 32 % 4 * 16 + lane / 4 + pair % 2 * 8;
  // Queries of a product. A last one without a second multiplies what was there before.
  constexpr int AT_ONCE = 64 / HEADS;
  int units = 0, pieces = 0;
  Walk walk(given);
  Piece piece;
  // What it writes to may still be read.
  wait_for_queries();
  while (walk.next(piece)) {
    int queries = piece.queries(given);
    float* out = given.out + piece.query(given) * given.out_width + key;
    wait(shared.query_full, pieces++ & 1);
#pragma unroll 1
    for (int block = piece.first + ((units ^ scorer) & 1); block < piece.last; block += SCORERS) {
      int unit = units + block - piece.first, stage = unit % STAGES;
      wait(&shared.full[stage], unit / STAGES & 1);
      Keys keys;
      load_keys(keys, shared.keys[stage]);
      float scale = shared.scales[stage][key];
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[stage]);
#pragma unroll 1
      for (int i = 0; i < queries; i += AT_ONCE) {
        float products[32];
        multiply_heads(products, keys, shared.queries[0][i]);
#pragma unroll
        for (int at = 0; at < AT_ONCE; at++) {
          float sum = add_heads<HEADS>(products, at, shared.weights[0][i + at]);
          if (pair < 2 && (at == 0 || i + at < queries)) out[(long long)(i + at) * given.out_width + block * BLOCK] = sum * scale;
        }
      }
    }
    units += piece.last - piece.first;
    __syncwarp();
    if (lane == 0) arrive(shared.query_empty);
  }
}

template <int HEADS>
__device__ __forceinline__ void score_all(Decoding<HEADS>& shared, const Arguments& given) {
  if (threadIdx.x == 0) {
    prefetch_map(given.pool_boxes);
    prefetch_map(given.query_boxes);
    shared.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < SCORERS * 128) score(shared, given, __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  else produce(shared, given);
}

#define INDEX_SCORES(HEADS)                                                                                                     \
  extern "C" __device__ int index_scores_##HEADS##_shared_bytes = sizeof(Decoding<HEADS>);                                      \
  extern "C" __global__ void __launch_bounds__(THREADS, CTAS) index_scores_##HEADS(const __grid_constant__ Arguments given) {   \
    extern __shared__ __align__(1024) u8 memory[];                                                                              \
    score_all(*reinterpret_cast<Decoding<HEADS>*>(memory), given);                                                              \
  }

INDEX_SCORES(32)
INDEX_SCORES(64)
