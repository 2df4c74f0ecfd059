// The lightning indexer's scores over a paged pool of e4m3 keys, products in FP8, for Hopper (sm_90a).
//
// Work. A unit is a block of 64 keys for up to 4 queries of a row, the last of which sees some of it. Units are numbered row by row,
// in a row by queries and then by blocks. CTAs, two on a multiprocessor, take equal shares of these numbers, so contexts of any
// lengths balance.
//
// Roles in a CTA: one warp copies blocks and queries. Two warpgroups take every other unit each. Keys are the rows of a product
// and its first operand, in registers: so a stage is free once they are loaded, shared memory is read for queries alone, and a
// key's heads are in four threads, which add them up without shared memory. While one warpgroup adds, others have the tensor
// cores.
//
// Bytes: 132 a key, once for decode; 4 a score. FLOPs: 2 * 64 * 128 for each key and query of 64 heads, at least 128 cycles a block
// and query, when a multiprocessor's share of memory's bandwidth brings a block in 466. Sums of 128 products are the tensor cores'
// own, as in the published kernels; those of heads are in float32.

#include "../../cuda/hopper.cuh"

constexpr int WIDTH = 128, BLOCK = 64, TOGETHER = 4, STAGES = 8;
// A block of the pool: its keys, then their scales. As rows of 128 bytes.
constexpr int KEY_BYTES = BLOCK * WIDTH, SCALES_BYTES = BLOCK * 4, BLOCK_BYTES = KEY_BYTES + SCALES_BYTES, BLOCK_ROWS = BLOCK_BYTES / WIDTH;
constexpr int SCORERS = 2, SCORE_THREADS = SCORERS * 128, THREADS = SCORE_THREADS + 32, CTAS = 2;

// Keys are 64 rows of 128 bytes and queries as many as heads, swizzled. HEADS: 32 or 64.
template <int HEADS>
struct Shared {
  u8 queries[TOGETHER][HEADS * WIDTH];
  u8 keys[STAGES][KEY_BYTES];
  float scales[STAGES][BLOCK];
  float weights[TOGETHER][HEADS];
  u64 query_full;
  u64 query_empty;
  u64 full[STAGES];
  u64 empty[STAGES];
};

// The sum of i / (BLOCK / TOGETHER) over all i from 0 to before `end`.
__device__ __forceinline__ int sum_of_quotients(int end) {
  constexpr int STEPS = BLOCK / TOGETHER;
  int whole = end / STEPS;
  return STEPS / 2 * whole * (whole - 1) + whole * (end - whole * STEPS);
}

struct Arguments {
  // Boxes of 64 rows of 128 bytes in the pool, and of a query's heads in the queries.
  TensorMap pool_boxes, query_boxes;
  const u8* pool;
  // [rows * query_tokens, heads]
  const float* weights;
  const int* block_table;
  const int* lengths;
  // [rows * query_tokens, out_width]
  float* out;
  int rows, table_stride, query_tokens, out_width;

  __device__ __forceinline__ int groups() const { return (query_tokens + TOGETHER - 1) / TOGETHER; }
  // Tokens before a row's queries.
  __device__ __forceinline__ int before(int row) const { return max(lengths[row] - query_tokens, 0); }
  // Blocks that a group of a row's queries sees.
  __device__ __forceinline__ int blocks_of(int row, int group) const {
    return row < rows ? (before(row) + min((group + 1) * TOGETHER, query_tokens) + BLOCK - 1) / BLOCK : 0;
  }
  // Those of the groups before it: quotients of numbers in steps of TOGETHER.
  __device__ __forceinline__ int units_before(int row, int group) const {
    int first = (before(row) + TOGETHER + BLOCK - 1) / TOGETHER;
    return sum_of_quotients(first + group) - sum_of_quotients(first);
  }
  __device__ __forceinline__ int units_of(int row) const {
    return row < rows ? units_before(row, groups() - 1) + blocks_of(row, groups() - 1) : 0;
  }
};

// Consecutive blocks of a row, for the queries of one group.
struct Piece {
  int row, group, first, last;

  __device__ __forceinline__ long long query(const Arguments& given) const {
    return (long long)row * given.query_tokens + group * TOGETHER;
  }
  __device__ __forceinline__ int queries(const Arguments& given) const { return min(given.query_tokens - group * TOGETHER, TOGETHER); }
};

// One warp: iterates over the pieces of this CTA's share of the units.
struct Walk {
  const Arguments& given;
  int row = 0, group = 0, block = 0, blocks = 0, left = 0;

  __device__ __forceinline__ explicit Walk(const Arguments& given) : given(given) {
    int lane = threadIdx.x % 32;
    long long total = 0;
    for (int first = 0; first < given.rows; first += 32) total += __reduce_add_sync(~0u, given.units_of(first + lane));
    long long begin = total * blockIdx.x / gridDim.x, before = 0;
    left = total * (blockIdx.x + 1) / gridDim.x - begin;
    if (!left) return;
    for (int first = 0;; first += 32) {
      int own = given.units_of(first + lane), sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      u32 after = __ballot_sync(~0u, before + sum > begin);
      if (!after) {
        before += __shfl_sync(~0u, sum, 31);
        continue;
      }
      int found = __ffs(after) - 1;
      row = first + found;
      find(begin - before - __shfl_sync(~0u, sum - own, found));
      return;
    }
  }
  // Finds the group and the block of the row's `unit`.
  __device__ __forceinline__ void find(int unit) {
    int step = 1;
    while (2 * step < given.groups()) step *= 2;
    for (; step; step /= 2)
      if (group + step < given.groups() && given.units_before(row, group + step) <= unit) group += step;
    block = unit - given.units_before(row, group);
    blocks = given.blocks_of(row, group);
  }
  __device__ __forceinline__ bool next(Piece& piece) {
    if (!left) return false;
    piece = {row, group, block, min(block + left, blocks)};
    left -= piece.last - piece.first;
    block = 0;
    if (++group == given.groups()) group = 0, row++;
    blocks = given.blocks_of(row, group);
    return true;
  }
};

// Each role calls this once.
__device__ __forceinline__ void wait_for_queries() {
  wait_for_earlier();
  start_next();
}

template <int HEADS>
__device__ __forceinline__ void copy_queries(Shared<HEADS>& shared, const Arguments& given, const Piece& piece) {
  int queries = piece.queries(given);
  long long first = piece.query(given);
  arrive_and_expect(&shared.query_full, queries * HEADS * (WIDTH + 4));
  for (int i = 0; i < queries; i++) {
    copy_box(shared.queries[i], given.query_boxes, 0, (first + i) * HEADS, &shared.query_full);
    copy_run(shared.weights[i], given.weights + (first + i) * HEADS, HEADS * 4, &shared.query_full);
  }
}

template <int HEADS>
__device__ __forceinline__ void copy_block(Shared<HEADS>& shared, const Arguments& given, int unit, int block) {
  int stage = unit % STAGES;
  wait(&shared.empty[stage], (unit / STAGES & 1) ^ 1);
  arrive_and_expect(&shared.full[stage], BLOCK_BYTES);
  copy_box(shared.keys[stage], given.pool_boxes, 0, block * BLOCK_ROWS, &shared.full[stage]);
  copy_run(shared.scales[stage], given.pool + (long long)block * BLOCK_BYTES + KEY_BYTES, SCALES_BYTES, &shared.full[stage]);
}

// One warp: copies the queries and blocks of all pieces. A lane looks up every 32nd block, 32 of them ahead. The plan and the keys
// are older than the previous kernel, which makes queries: the first blocks are copied before it has ended.
template <int HEADS>
__device__ __forceinline__ void produce(Shared<HEADS>& shared, const Arguments& given) {
  int lane = threadIdx.x % 32, unit = 0, pieces = 0, ahead = 0;
  Walk walk(given);
  Piece piece;
  while (walk.next(piece)) {
    const int* stored = given.block_table + (long long)piece.row * given.table_stride;
    int next = stored[min(piece.first + lane, piece.last - 1)];
    if (!pieces) {
      for (; ahead < min(piece.last - piece.first, STAGES); ahead++) {
        int block = __shfl_sync(~0u, next, ahead);
        if (lane == 0) copy_block(shared, given, ahead, block);
      }
      wait_for_queries();
    }
    if (lane == 0) {
      wait(&shared.query_empty, (pieces & 1) ^ 1);
      copy_queries(shared, given, piece);
    }
    pieces++;
    for (int first = piece.first; first < piece.last; first += 32) {
      int own = next;
      next = stored[min(first + 32 + lane, piece.last - 1)];
      for (int i = 0; i < min(piece.last - first, 32); i++, unit++) {
        int block = __shfl_sync(~0u, own, i);
        if (lane == 0 && unit >= ahead) copy_block(shared, given, unit, block);
      }
      __syncwarp();
    }
  }
}

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
__device__ __forceinline__ void score(Shared<HEADS>& shared, const Arguments& given, int scorer) {
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
    wait(&shared.query_full, pieces++ & 1);
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
        multiply_heads(products, keys, shared.queries[i]);
#pragma unroll
        for (int at = 0; at < AT_ONCE; at++) {
          float sum = add_heads<HEADS>(products, at, shared.weights[i + at]);
          if (pair < 2 && (at == 0 || i + at < queries)) out[(long long)(i + at) * given.out_width + block * BLOCK] = sum * scale;
        }
      }
    }
    units += piece.last - piece.first;
    __syncwarp();
    if (lane == 0) arrive(&shared.query_empty);
  }
}

template <int HEADS>
__device__ __forceinline__ void score_all(Shared<HEADS>& shared, const Arguments& given) {
  if (threadIdx.x == 0) {
    prefetch_map(given.pool_boxes);
    prefetch_map(given.query_boxes);
    init_barrier(&shared.query_full, 1);
    init_barrier(&shared.query_empty, SCORE_THREADS / 32);
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(&shared.full[stage], 1);
      init_barrier(&shared.empty[stage], 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < SCORE_THREADS) score(shared, given, __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  else produce(shared, given);
}

#define INDEX_SCORES(HEADS)                                                                                                     \
  extern "C" __device__ int index_scores_##HEADS##_shared_bytes = sizeof(Shared<HEADS>);                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, CTAS) index_scores_##HEADS(const __grid_constant__ Arguments given) {   \
    extern __shared__ __align__(1024) u8 memory[];                                                                              \
    score_all(*reinterpret_cast<Shared<HEADS>*>(memory), given);                                                                \
  }

INDEX_SCORES(32)
INDEX_SCORES(64)
