// How the work of decode attention is cut: into parts, one for each group of CTAs, and these into pieces of requests.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int LATENT = 512, WIDTH = 576, BLOCK = 64, HEADS = 64;
constexpr float LOWEST = -1e30f;

// Units of a request, one behind the other.
struct alignas(16) Piece {
  int request, first, last;
  // Where it waits to be joined with the others of its request, which lie in their order; below zero, it is the whole.
  int slot;

  __device__ __forceinline__ bool whole() const { return slot < 0; }
};

struct Part {
  int begin, end;
};

// A request that was cut, and where its pieces wait to be joined: the first slot, and the one behind the last.
struct alignas(16) Cut {
  int request, first, last, unused;
};

// What `schedule` makes, and the attending kernels read beside what is their own.
struct Work {
  const int* block_table;
  const int* lengths;
  u32* out;
  // Of cut requests: [slots, query tokens, heads], values of 512 channels and the base-2 logarithm of their sum.
  u32* values;
  float* log_sums;
  // Where each part's pieces begin, [parts + 1]; the pieces, [requests + parts].
  int* parts;
  Piece* pieces;
  // The cut requests, [parts]; behind them some without slots.
  Cut* cuts;
  // What `schedule` tries: [tried, requests].
  int* tried;
  // Units of each request, and all by falling length: which, and its units, [requests].
  int* units;
  int2* order;
  int requests, table_stride, query_tokens, heads, part_count;
  // Tokens of a unit, of which a piece has whole ones.
  int unit_tokens;

  __device__ __forceinline__ int row_tiles() const { return query_tokens * ((heads + HEADS - 1) / HEADS); }
  __device__ __forceinline__ Part part(int index) const { return {parts[index], parts[index + 1]}; }
};

// The row of `out`, or of `values`, at which a piece's results of one query and head begin.
__device__ __forceinline__ long long row_of(const Work& work, const Piece& piece, int query_index, int head) {
  long long first = piece.whole() ? piece.request : piece.slot;
  return (first * work.query_tokens + query_index) * work.heads + head;
}
