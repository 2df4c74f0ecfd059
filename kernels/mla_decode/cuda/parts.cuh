// How the work of decode attention is cut: into parts, one for each group of CTAs, and these into pieces of requests.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int LATENT = 512, WIDTH = 576, BLOCK = 64, HEADS = 64;
constexpr float LOWEST = -1e30f;

// What `schedule` and `combine` read; the attending kernels have it with what is their own.
struct Work {
  const int* block_table;
  const int* lengths;
  u32* out;
  // Of cut requests: [parts + requests, query tokens, heads], by the part's and the request's index together.
  u32* pieces;
  float* log_sums;
  // Made by `schedule`: the request and its unit at which each part begins, [parts + 1, 2]; each request's first and last
  // part, [requests, 2]; where each request's cost begins, [requests + 1].
  int2* parts;
  int2* borders;
  int* starts;
  int requests, table_stride, query_tokens, heads, part_count;
  // Tokens of a unit, of which a part has whole ones.
  int unit_tokens;
};

struct Piece {
  int request, first, last;
  bool whole;
};

struct Part {
  int index;
  int2 begin, end;

  __device__ __forceinline__ bool has(int request) const {
    return request < end.x || (request == end.x && end.y > 0);
  }
  __device__ __forceinline__ Piece piece(int request, int units) const {
    Piece piece{request, request == begin.x ? begin.y : 0, request == end.x ? end.y : units, false};
    piece.whole = piece.first == 0 && piece.last == units;
    return piece;
  }
};

__device__ __forceinline__ Part own_part(const Work& work, int index) {
  return {index, work.parts[index], work.parts[index + 1]};
}

// The row of `out`, or of `pieces`, at which a piece's results of one query and head begin.
__device__ __forceinline__ long long row_of(const Work& work, const Part& part, const Piece& piece, int query_index, int head) {
  long long slot = piece.whole ? piece.request : part.index + piece.request;
  return (slot * work.query_tokens + query_index) * work.heads + head;
}
