// The lightning indexer's scores as `scores.cu` computes them, of rows of many queries.
//
// One CTA runs on a multiprocessor: one warp copies, and four warpgroups multiply and add. A product has 128 heads, two queries of 64 or
// four of 32. A warpgroup has the same product of each unit that it takes: so what heads count stays in its registers over a
// piece, and shared memory is read for products alone. Keys are its first operand, in shared memory: with weights in
// registers there is no room for them. With 64 heads two warpgroups read each block.
//
// Limit: 128 cycles a block and query of 64 heads, in which each of a multiprocessor's four parts issues some 80 instructions to
// add them.

#include "copies.cuh"

constexpr int STAGES = 16, BUFFERS = 2, SCORERS = 4, SCORE_THREADS = SCORERS * 128, THREADS = SCORE_THREADS + 128;
// Heads of a product, and its sums that a thread has.
constexpr int COLUMNS = 128, SUMS = COLUMNS / 2;
constexpr int SCORE_REGISTERS = 112, COPY_REGISTERS = 32;
// A launch has a multiple of 8 for each thread. Who asks for more than that waits forever.
static_assert(SCORERS * SCORE_REGISTERS + COPY_REGISTERS <= (SCORERS + 1) * (65536 / THREADS / 8 * 8), "more registers than there are");

// Warpgroups that read a block: one for each product of a group of queries.
template <int HEADS>
constexpr int PRODUCTS = TOGETHER * HEADS / COLUMNS;

template <int HEADS>
using Prompts = Shared<HEADS, STAGES, BUFFERS, SCORERS, PRODUCTS<HEADS>>;

__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, %64, %65, p, 1, 1;\n}"
      : BIND_64(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

// The products of 64 keys and 128 heads. The thread has two keys, 8 apart, and two heads of each 8.
__device__ __forceinline__ void multiply_heads(float (&products)[SUMS], const u8* stage, const u8* query) {
  u64 keys = descriptor<1>(shared_address(stage)), heads = descriptor<1>(shared_address(query));
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < WIDTH / 32; step++) multiply(products, keys + step * 2, heads + step * 2, step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(products);
}

// Weighted sums over heads: of a product's queries, each for both of the thread's keys. weights: of the thread's heads.
template <int HEADS>
__device__ __forceinline__ void add_heads(float (&sums)[2 * COLUMNS / HEADS], const float (&products)[SUMS], const float2 (&weights)[COLUMNS / 8]) {
#pragma unroll
  for (int query = 0; query < COLUMNS / HEADS; query++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < HEADS / 8; i++) {
        int at = query * (HEADS / 8) + i;
        sum = fmaf(fmaxf(products[at * 4 + half * 2], 0.0f), weights[at].x, sum);
        sum = fmaf(fmaxf(products[at * 4 + half * 2 + 1], 0.0f), weights[at].y, sum);
      }
      sums[query * 2 + half] = sum;
    }
}

// Adds up four neighbouring threads' N values. Each gets a quarter of the sums, in its first places.
template <int N>
__device__ __forceinline__ void add_threads(float (&values)[N]) {
#pragma unroll
  for (int step = 2; step; step /= 2) {
    bool later = threadIdx.x & step;
    int kept = step == 2 ? N / 2 : N / 4;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      if (i < kept) {
        float given = later ? values[i] : values[i + kept], own = later ? values[i + kept] : values[i];
        values[i] = own + __shfl_xor_sync(~0u, given, step);
      }
  }
}

// A warpgroup: scores its product's queries for each unit that it takes. Scores after a row's last token are written and mean nothing.
template <int HEADS>
__device__ __forceinline__ void score(Prompts<HEADS>& shared, const Arguments& given, int scorer) {
  constexpr int QUERIES = COLUMNS / HEADS, VALUES = 2 * QUERIES, OWN = VALUES / 4, TURNS = SCORERS / PRODUCTS<HEADS>;
  int lane = threadIdx.x % 32, pair = lane % 4, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  int first = scorer % PRODUCTS<HEADS> * QUERIES, turn = scorer / PRODUCTS<HEADS>;
  // Where this thread's begin among the values of all four threads: the query's, and then its keys'.
  int own_query = first + pair * OWN / 2, own_half = OWN == 1 ? pair % 2 : 0;
  int units = 0, pieces = 0;
  Walk walk(given);
  Piece piece;
  // What it writes to may still be read.
  wait_for_queries();
  while (walk.next(piece)) {
    int buffer = pieces % BUFFERS;
    bool seen = own_query < piece.queries(given);
    float* out = given.out + (piece.query(given) + own_query) * given.out_width + row;
    wait(&shared.query_full[buffer], pieces++ / BUFFERS & 1);
    float2 weights[COLUMNS / 8];
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) weights[i] = *reinterpret_cast<const float2*>(&shared.weights[buffer][first][0] + i * 8 + pair * 2);
#pragma unroll 1
    for (int block = piece.first + ((turn - units) & (TURNS - 1)); block < piece.last; block += TURNS) {
      int unit = units + block - piece.first, stage = unit % STAGES;
      wait(&shared.full[stage], unit / STAGES & 1);
      float products[SUMS], scales[OWN], sums[VALUES];
      multiply_heads(products, shared.keys[stage], shared.queries[buffer][first]);
#pragma unroll
      for (int i = 0; i < OWN; i++) scales[i] = shared.scales[stage][row + (own_half + i) * 8];
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[stage]);
      add_heads<HEADS>(sums, products, weights);
      add_threads(sums);
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (seen) out[block * BLOCK + (own_half + i) * 8] = sums[i] * scales[i];
    }
    units += piece.last - piece.first;
    __syncwarp();
    if (lane == 0) arrive(&shared.query_empty[buffer]);
  }
}

template <int HEADS>
__device__ __forceinline__ void score_all(Prompts<HEADS>& shared, const Arguments& given) {
  if (threadIdx.x == 0) {
    prefetch_map(given.pool_boxes);
    prefetch_map(given.query_boxes);
    shared.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < SCORE_THREADS) {
    take_registers<SCORE_REGISTERS>();
    score(shared, given, __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  } else {
    give_registers<COPY_REGISTERS>();
    if (threadIdx.x < SCORE_THREADS + 32) produce(shared, given);
  }
}

#define PROMPT_SCORES(HEADS)                                                                                              \
  extern "C" __device__ int prompt_scores_##HEADS##_shared_bytes = sizeof(Prompts<HEADS>);                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_scores_##HEADS(const __grid_constant__ Arguments given) { \
    extern __shared__ __align__(1024) u8 memory[];                                                                        \
    score_all(*reinterpret_cast<Prompts<HEADS>*>(memory), given);                                                         \
  }

PROMPT_SCORES(32)
PROMPT_SCORES(64)
