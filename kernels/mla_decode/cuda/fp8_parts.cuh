// How decode attention over e4m3 latents cuts its work: arguments, units, parts, pieces.

#pragma once

#include "hopper.cuh"

constexpr int LATENT = 512, WIDTH = 576, BLOCK = 64, HEADS = 64, STAGES = 5;
constexpr int TILE_BYTES = BLOCK * WIDTH, ROPE_OFFSET = BLOCK * LATENT, CHUNK_BYTES = BLOCK * 128;
constexpr int CONSUMERS = 256, PRODUCERS = 128;
// Units that the start and the end of a piece cost, about.
constexpr int PIECE_COST = 1;
constexpr float LOWEST = -1e30f;
// Probabilities are kept 16 times as large: e4m3's smallest steps are then far below the largest. The maximum they refer
// to is raised only when it has grown by more than RAISE (log2), which keeps them below e4m3's end, 448, and makes it rare
// that what was summed must be made smaller.
constexpr float LOG2_P = 4.0f, RAISE = 4.0f;

struct Arguments {
  // Of the pool as rows of bytes: 64 rows of 128, and of 64.
  TensorMap latents, keys;
  const u32* query;
  const u8* pool;
  const int* block_table;
  const int* lengths;
  u32* out;
  // Of cut requests: [parts + requests, query tokens, heads], by the part's and the request's index together.
  u32* pieces;
  float* log_sums;
  // Made by `schedule`: where each request's cost begins, [requests + 1]; its first and last part, [requests, 2].
  int* starts;
  int* borders;
  int requests, table_stride, query_tokens, heads, parts;
  float scale_log2, kv_scale;
};

struct Piece {
  int request, first, last;
};

__device__ __forceinline__ int units_of(int length) { return (length + 2 * BLOCK - 1) / (2 * BLOCK); }

// Part p has the costs [p * total / parts, (p + 1) * total / parts); there are no more parts than costs.
__device__ __forceinline__ int part_of(int cost, int total, int parts) {
  return (int)(((long long)(cost + 1) * min(parts, total) - 1) / total);
}

// The part's next piece from `request` on; false at its end.
__device__ __forceinline__ bool next_piece(const int* starts, int requests, int begin, int end, Piece& piece) {
  for (; piece.request < requests && starts[piece.request] < end; piece.request++) {
    int base = starts[piece.request] + PIECE_COST, units = starts[piece.request + 1] - base;
    piece.first = max(begin - base, 0);
    piece.last = min(end - base, units);
    if (piece.first < piece.last) return true;
  }
  return false;
}

struct Part {
  int begin, end, index;
};

__device__ __forceinline__ Part own_part(const int* starts, int requests, int parts, int index) {
  int total = starts[requests], used = min(parts, total);
  if (index >= used) return {0, 0, index};
  return {(int)((long long)index * total / used), (int)((long long)(index + 1) * total / used), index};
}

__device__ __forceinline__ int first_request(const int* starts, int requests, int begin) {
  int low = 0, high = requests - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (starts[middle] <= begin) low = middle; else high = middle - 1;
  }
  return low;
}
