// The work of index scores, in units of equal length: a block of 64 keys for up to 4 queries of a row, the last of which sees some
// of it. Units are numbered row by row, in a row by queries and then by blocks. CTAs take equal shares of these numbers, so
// contexts of any lengths balance.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int WIDTH = 128, BLOCK = 64, TOGETHER = 4;

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
