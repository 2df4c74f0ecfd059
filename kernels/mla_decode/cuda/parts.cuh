// How the work of decode attention is divided: into parts, one for each group of CTAs, and parts into pieces of requests. A
// request whose pieces lie in several parts is split.

#pragma once

#include "../../cuda/hopper.cuh"

// A latent's width without its key and with it; tokens of a block; heads of a CTA.
constexpr int LATENT = 512, WIDTH = 576, BLOCK = 64, HEADS = 64;
constexpr float LOWEST = -1e30f;
// Up to this many tokens pieces are joined where values are expanded (`kernels/mla_projections`), beyond by `combine`.
constexpr int FEW_TOKENS = 2;

// Consecutive units of one request.
struct alignas(16) Piece {
  int request, first, last;
  // Slot where the piece's result waits to be combined with the others of its request, which lie in order. Negative if the
  // piece is the whole request.
  int slot;

  __device__ __forceinline__ bool whole() const { return slot < 0; }
};

struct Part {
  int begin, end;
};

// A split request and the slots of its pieces: the first slot, and the one after the last.
struct alignas(16) SplitRequest {
  int request, first, last, unused;
};

// What `schedule` writes, and what the attention kernels read in addition to arguments of their own.
struct Work {
  const int* block_table;
  const int* lengths;
  u32* out;
  // Results of split requests, [slots, query tokens, heads]: values of 512 channels, and the base-2 logarithm of their sum.
  u32* values;
  float* log_sums;
  // Index of each part's first piece, [parts + 1]; the pieces, [requests + parts].
  int* parts;
  Piece* pieces;
  // The split requests, [parts]; the rest of the array has no slots. Null if there is one request, which every part has a
  // piece of.
  SplitRequest* split_requests;
  // The packings that `schedule` tries: [tried, requests].
  int* tried;
  // Units of each request, [requests]; index and units of each request, the longest first, [requests].
  int* units;
  int2* order;
  int requests, table_stride, query_tokens, heads, part_count;
  // Tokens of a unit. Pieces consist of whole units.
  int unit_tokens;

  __device__ __forceinline__ int row_tiles() const { return query_tokens * ((heads + HEADS - 1) / HEADS); }
  __device__ __forceinline__ Part part(int index) const { return {parts[index], parts[index + 1]}; }
  __device__ __forceinline__ SplitRequest split_request(int index) const {
    if (!split_requests) return {0, 0, index == 0 ? part_count : 0, 0};
    return index < part_count ? split_requests[index] : SplitRequest{0, 0, 0, 0};
  }
};

// Row of `out` or of `values` where a piece's results begin, for one query and first head.
__device__ __forceinline__ long long row_of(const Work& work, const Piece& piece, int query_index, int head) {
  long long first = piece.whole() ? piece.request : piece.slot;
  return (first * work.query_tokens + query_index) * work.heads + head;
}
