// Which tiles of the experts' products a CTA makes.

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int TILE_OUTPUTS = 64, GROUP_INPUTS = 128, WEIGHT_BYTES = TILE_OUTPUTS * GROUP_INPUTS / 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + TILE_OUTPUTS * 2;
constexpr int MOST_EXPERTS = 512;

// What one product multiplies.
struct Operands {
  TensorMap x;
  // [experts, output_tiles, groups, TILE_BYTES].
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
  unsigned short* out;
  // capacity: rows that an expert has room for; all rows of a contiguous layout.
  int experts, capacity, contiguous, static_scales;
};

// Rows of one expert by some outputs of the first product, which is `gated`, or of the last one.
struct Tile {
  int expert, first_row, rows, first_output_tile, row_tile, gated;
};

// Goes through the tiles of this CTA, every one of `gridDim`: those of the first product, then those of the last one. Tiles of
// one expert's weights follow each other, so that what several tiles of rows share is read from memory once. While some CTAs
// make one tile more of the first product than others, these begin with the last one's, if rows of that are ready by then.
template <int ROWS, int OUTPUT_TILES>
struct Walk {
  const Arguments& given;
  // Masked layouts: tiles of rows of each expert and of all experts before it.
  const int* ends;
  int index, expert, gated;
  // CTAs that make one tile more of the first product; tiles of the last one that this CTA makes meanwhile.
  int late, ahead;

  __device__ __forceinline__ Walk(const Arguments& given, const int* ends)
      : given(given), ends(ends), index(blockIdx.x), expert(0), gated(1), late(0), ahead(0) {}

  // The next tile; one without rows if none is left. A whole warp calls this, and the shuffles tell the compiler that the
  // tile is the same for all of its threads.
  __device__ __forceinline__ Tile next() {
    Tile tile{0, 0, 0, 0, 0, 0};
    if (gated) find(given.first, tile);
    if (!tile.rows) {
      if (gated) begin_last();
      find(given.last, tile);
    }
    return Tile{__shfl_sync(~0u, tile.expert, 0), __shfl_sync(~0u, tile.first_row, 0), __shfl_sync(~0u, tile.rows, 0),
                __shfl_sync(~0u, tile.first_output_tile, 0), __shfl_sync(~0u, tile.row_tile, 0), __shfl_sync(~0u, gated, 0)};
  }

  __device__ __forceinline__ static int wide_tiles(const Operands& operands) {
    return (operands.output_tiles + OUTPUT_TILES - 1) / OUTPUT_TILES;
  }

 private:
  __device__ __forceinline__ void begin_last() {
    int ctas = gridDim.x, tiles = given.contiguous ? given.capacity / ROWS : ends[given.experts - 1];
    int first_tiles = tiles * wide_tiles(given.first);
    // If no CTA has two tiles of the first product, no rows are ready before all of these tiles are made.
    int rounds = first_tiles < ctas ? 0 : given.first.groups / given.last.groups;
    late = first_tiles % ctas;
    index = (blockIdx.x + ctas - late) % ctas;
    if (index < ctas - late) ahead = late ? rounds : 0;
    else index += rounds * (ctas - late);
    expert = gated = 0;
  }

  __device__ __forceinline__ void advance() { index += ahead-- > 0 ? gridDim.x - late : gridDim.x; }

  __device__ __forceinline__ void find(const Operands& operands, Tile& tile) {
    if (given.contiguous) find_contiguous(wide_tiles(operands), tile);
    else find_masked(wide_tiles(operands), tile);
  }

  // The first expert from this one on whose tiles end behind the index. Few may have any: the warp looks at 32 at a time.
  __device__ __forceinline__ void find_expert(int wide) {
    for (; expert < given.experts; expert += 32) {
      int other = expert + threadIdx.x % 32;
      u32 behind = __ballot_sync(~0u, other < given.experts && index < ends[other] * wide);
      if (!behind) continue;
      expert += __ffs(behind) - 1;
      return;
    }
  }

  __device__ __forceinline__ void find_masked(int wide, Tile& tile) {
    find_expert(wide);
    if (expert >= given.experts) return;
    int begin = expert ? ends[expert - 1] : 0;
    int row_tiles = ends[expert] - begin, at = index - begin * wide, row_tile = at % row_tiles, row = row_tile * ROWS;
    tile.expert = expert;
    tile.first_row = expert * given.capacity + row;
    tile.rows = min(given.layout[expert] - row, ROWS);
    tile.first_output_tile = at / row_tiles * OUTPUT_TILES;
    tile.row_tile = begin + row_tile;
    advance();
  }

  // Tiles that run at about the same time share weights (eight tiles of rows) and rows (16 of outputs).
  __device__ __forceinline__ void find_contiguous(int wide, Tile& tile) {
    constexpr int TOGETHER = 8;
    int row_tiles = given.capacity / ROWS;
    for (; index < row_tiles * wide; advance()) {
      int block = index / (TOGETHER * wide), at = index % (TOGETHER * wide);
      int together = min(TOGETHER, row_tiles - block * TOGETHER);
      tile.row_tile = block * TOGETHER + at % together;
      tile.first_row = tile.row_tile * ROWS;
      tile.first_output_tile = at / together * OUTPUT_TILES;
      tile.expert = given.layout[tile.first_row];
      tile.rows = used_rows(tile.first_row);
      if (!tile.rows) continue;
      advance();
      return;
    }
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
