// Which tiles of the experts' products a CTA makes.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int TILE_OUTPUTS = 64, GROUP_INPUTS = 128, WEIGHT_BYTES = TILE_OUTPUTS * GROUP_INPUTS / 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + TILE_OUTPUTS * 2;
constexpr int MOST_EXPERTS = 512;

struct Arguments {
  TensorMap x;
  // [experts, output_tiles, groups, TILE_BYTES].
  const u8* weight;
  // One an expert if they are static, or one a row.
  const float* x_scales;
  // [experts], the rows of each; for a contiguous layout [rows], the expert of each.
  const int* layout;
  unsigned short* out;
  int experts, output_tiles, groups;
  // Rows that an expert has room for; all rows of a contiguous layout.
  int capacity;
  int contiguous, static_scales;
};

// Rows of one expert by some outputs.
struct Tile {
  int expert, first_row, rows, first_output_tile;
};

// Goes through the tiles of this CTA, every one of `gridDim`. Those of one expert's weights follow each other, so that what
// several tiles of rows share is read from memory once.
template <int ROWS, int OUTPUT_TILES>
struct Walk {
  const Arguments& given;
  // Masked layouts: tiles of rows of each expert and of all experts before it.
  const int* ends;
  int index, expert, begin;

  __device__ __forceinline__ Walk(const Arguments& given, const int* ends)
      : given(given), ends(ends), index(blockIdx.x), expert(0), begin(0) {}

  // The next tile; one without rows if none is left. A whole warp calls this, and the shuffles tell the compiler that the
  // tile is the same for all of its threads.
  __device__ __forceinline__ Tile next() {
    Tile tile{0, 0, 0, 0};
    if (given.contiguous) next_contiguous(tile);
    else next_masked(tile);
    return Tile{__shfl_sync(~0u, tile.expert, 0), __shfl_sync(~0u, tile.first_row, 0), __shfl_sync(~0u, tile.rows, 0),
                __shfl_sync(~0u, tile.first_output_tile, 0)};
  }

 private:
  __device__ __forceinline__ int wide_tiles() const { return (given.output_tiles + OUTPUT_TILES - 1) / OUTPUT_TILES; }

  __device__ __forceinline__ void next_masked(Tile& tile) {
    int wide = wide_tiles();
    while (expert < given.experts && index >= ends[expert] * wide) begin = ends[expert++];
    if (expert == given.experts) return;
    int row_tiles = ends[expert] - begin, at = index - begin * wide, row = at % row_tiles * ROWS;
    tile.expert = expert;
    tile.first_row = expert * given.capacity + row;
    tile.rows = min(given.layout[expert] - row, ROWS);
    tile.first_output_tile = at / row_tiles * OUTPUT_TILES;
    index += gridDim.x;
  }

  // Tiles that run at about the same time share weights (eight tiles of rows) and rows (16 of outputs).
  __device__ __forceinline__ void next_contiguous(Tile& tile) {
    constexpr int TOGETHER = 8;
    int wide = wide_tiles(), row_tiles = given.capacity / ROWS;
    for (; index < row_tiles * wide; index += gridDim.x) {
      int block = index / (TOGETHER * wide), at = index % (TOGETHER * wide);
      int together = min(TOGETHER, row_tiles - block * TOGETHER);
      tile.first_row = (block * TOGETHER + at % together) * ROWS;
      tile.first_output_tile = at / together * OUTPUT_TILES;
      tile.expert = given.layout[tile.first_row];
      if (tile.expert < 0) continue;
      tile.rows = ROWS;
      index += gridDim.x;
      return;
    }
  }
};

// One warp adds up the tiles of rows of each expert and of all experts before it.
template <int ROWS>
__device__ __forceinline__ void count_tiles(const int* counts, int experts, int* ends) {
  int lane = threadIdx.x % 32, before = 0;
  for (int first = 0; first < experts; first += 32) {
    int expert = first + lane, sum = expert < experts ? (counts[expert] + ROWS - 1) / ROWS : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (expert < experts) ends[expert] = before + sum;
    before += __shfl_sync(~0u, sum, 31);
  }
}
