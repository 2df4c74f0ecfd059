// Which tiles of the experts' products a CTA makes.

#pragma once

#include "products.cuh"

// What one product multiplies.
struct Operands {
  TensorMap x;
  // [experts, output_tiles, groups, bytes of a tile].
  const u8* weight;
  // One an expert if they are static, or one a row.
  const float* x_scales;
  int output_tiles, groups;
};

struct Arguments {
  // Gate and up, whose gated outputs are the rows of the last product. It has no output tiles if the last one stands alone.
  Operands first, last;
  // [experts], the rows of each; for a contiguous layout [rows], the expert of each.
  const int* layout;
  // [experts, first.output_tiles * 32]: what gated values are multiplied by before they are rounded.
  const float* factors;
  // [rows, first.output_tiles * 32] e4m3.
  u8* inner;
  // By tile of rows: see `progress.cuh`.
  int* progress;
  // How many tiles CTAs have drawn; zero before and after.
  int* drawn;
  unsigned short* out;
  // capacity: rows that an expert has room for; all rows of a contiguous layout.
  int experts, capacity, contiguous, static_scales;
};

// Rows of one expert by some outputs of the first product, which is `gated`, or of the last one.
struct Tile {
  int expert, first_row, rows, first_output_tile, row_tile, gated;
};

// Finds tiles by their ascending numbers: those of the first product, then those of the last one. Tiles of one expert's weights
// follow each other, so that what several tiles of rows share is read from memory once.
template <int ROWS, int OUTPUT_TILES>
struct Walk {
  const Arguments& given;
  // Masked layouts: tiles of rows of each expert and of all experts before it.
  const int* ends;
  // Tiles of rows, and tiles, of both products.
  int row_tiles, tiles;
  int expert, gated;

  __device__ __forceinline__ Walk(const Arguments& given, const int* ends)
      : given(given), ends(ends), row_tiles(given.contiguous ? ends[0] : ends[given.experts - 1]),
        tiles(row_tiles * (wide_tiles(given.first) + wide_tiles(given.last))), expert(0), gated(1) {}

  // The tile with this number, which is larger than in the call before; a tile without rows after the last one. A whole warp
  // calls this, and the shuffles tell the compiler that the tile is the same for all of its threads.
  __device__ __forceinline__ Tile at(int number) {
    Tile tile{0, 0, 0, 0, 0, 0};
    int of_last = number - row_tiles * wide_tiles(given.first);
    if (gated && of_last >= 0) gated = expert = 0;
    if (number < tiles) find(gated ? given.first : given.last, gated ? number : of_last, tile);
    return Tile{__shfl_sync(~0u, tile.expert, 0), __shfl_sync(~0u, tile.first_row, 0), __shfl_sync(~0u, tile.rows, 0),
                __shfl_sync(~0u, tile.first_output_tile, 0), __shfl_sync(~0u, tile.row_tile, 0), __shfl_sync(~0u, gated, 0)};
  }

  __device__ __forceinline__ static int wide_tiles(const Operands& operands) {
    return (operands.output_tiles + OUTPUT_TILES - 1) / OUTPUT_TILES;
  }

 private:
  __device__ __forceinline__ void find(const Operands& operands, int index, Tile& tile) {
    if (given.contiguous) find_contiguous(wide_tiles(operands), index, tile);
    else find_masked(wide_tiles(operands), index, tile);
  }

  // The first expert, from this one on, whose tiles end after the index. Few may have any: the warp looks at 32 at a time.
  __device__ __forceinline__ void find_expert(int wide, int index) {
    for (; expert < given.experts; expert += 32) {
      int other = expert + threadIdx.x % 32;
      u32 later = __ballot_sync(~0u, other < given.experts && index < ends[other] * wide);
      if (!later) continue;
      expert += __ffs(later) - 1;
      return;
    }
  }

  __device__ __forceinline__ void find_masked(int wide, int index, Tile& tile) {
    find_expert(wide, index);
    int begin = expert ? ends[expert - 1] : 0;
    int row_tiles = ends[expert] - begin, at = index - begin * wide, row_tile = at % row_tiles, row = row_tile * ROWS;
    tile.expert = expert;
    tile.first_row = expert * given.capacity + row;
    tile.rows = min(given.layout[expert] - row, ROWS);
    tile.first_output_tile = at / row_tiles * OUTPUT_TILES;
    tile.row_tile = begin + row_tile;
  }

  // Tiles that run at about the same time share weights (eight tiles of rows) and rows (16 of outputs).
  __device__ __forceinline__ void find_contiguous(int wide, int index, Tile& tile) {
    constexpr int TOGETHER = 8;
    int block = index / (TOGETHER * wide), at = index % (TOGETHER * wide);
    int together = min(TOGETHER, row_tiles - block * TOGETHER);
    tile.row_tile = block * TOGETHER + at % together;
    tile.first_row = tile.row_tile * ROWS;
    tile.first_output_tile = at / together * OUTPUT_TILES;
    tile.expert = given.layout[tile.first_row];
    tile.rows = used_rows(tile.first_row);
  }

  // Padding follows an expert's rows.
  __device__ __forceinline__ int used_rows(int first_row) const {
    int used = 0;
#pragma unroll
    for (int at = threadIdx.x % 32; at < (ROWS + 31) / 32 * 32; at += 32)
      used += __popc(__ballot_sync(~0u, at < ROWS && given.layout[first_row + at] >= 0));
    return used;
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

// One warp counts the tiles of a contiguous layout that belong to an expert, which come before the others.
template <int ROWS>
__device__ __forceinline__ void count_used_tiles(const int* layout, int row_tiles, int* used) {
  int lane = threadIdx.x % 32, first = 0, last = row_tiles;
  // Tiles before `first` belong to an expert, those from `last` on to none. Each lane looks at the end of a part of the rest.
  while (first < last) {
    int part = (last - first + 31) / 32, at = min(first + (lane + 1) * part, last) - 1;
    int parts = __popc(__ballot_sync(~0u, layout[at * ROWS] >= 0));
    last = min(first + (parts + 1) * part - 1, last);
    first = min(first + parts * part, last);
  }
  if (lane == 0) *used = first;
}
