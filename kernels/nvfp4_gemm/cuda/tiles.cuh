// Which tiles of the experts' products a CTA makes.

#pragma once

#include "../../cuda/hopper.cuh"

// A tile of weights: two codes a byte, and a scale of each output and 16 inputs.
constexpr int TILE_OUTPUTS = 64, TILE_INPUTS = 128, CODE_BYTES = TILE_OUTPUTS * TILE_INPUTS / 2;
constexpr int SCALE_BYTES = TILE_OUTPUTS * TILE_INPUTS / 16;
constexpr int MOST_EXPERTS = 512;

struct Arguments {
  TensorMap x;
  // [experts, groups, output_tiles, CODE_BYTES] and [experts, groups, output_tiles, SCALE_BYTES].
  const u8 *codes, *scales;
  // [experts, parts].
  const float* global_scales;
  // [experts]: the row after each expert's last one.
  const int* ends;
  unsigned short* out;
  // Groups of TILE_INPUTS inputs.
  int experts, output_tiles, groups;
  // Matrices with a global scale each, one after another along the outputs.
  int parts;
};

// Rows of one expert by some outputs.
struct Tile {
  int expert, first_row, rows, first_output_tile;
};

// Goes through the tiles of this CTA, every gridDim-th one. Tiles that run at about the same time share weights (up to
// eight tiles of rows) and rows.
template <int ROWS, int OUTPUT_TILES>
struct Walk {
  const Arguments& given;
  // Tiles of rows of each expert and of all experts before it.
  const int* tile_ends;
  int index, expert, begin;

  __device__ __forceinline__ Walk(const Arguments& given, const int* tile_ends)
      : given(given), tile_ends(tile_ends), index(blockIdx.x), expert(0), begin(0) {}

  // The next tile; one without rows if none is left. A whole warp calls this, and the shuffles tell the compiler that the
  // tile is the same for all of its threads.
  __device__ __forceinline__ Tile next() {
    Tile tile = find();
    return Tile{__shfl_sync(~0u, tile.expert, 0), __shfl_sync(~0u, tile.first_row, 0), __shfl_sync(~0u, tile.rows, 0),
                __shfl_sync(~0u, tile.first_output_tile, 0)};
  }

 private:
  __device__ __forceinline__ Tile find() {
    constexpr int TOGETHER = 8;
    int wide = (given.output_tiles + OUTPUT_TILES - 1) / OUTPUT_TILES;
    while (expert < given.experts && index >= tile_ends[expert] * wide) begin = tile_ends[expert++];
    if (expert == given.experts) return Tile{0, 0, 0, 0};
    int at = index - begin * wide, block = at / (TOGETHER * wide), within = at % (TOGETHER * wide);
    int together = min(TOGETHER, tile_ends[expert] - begin - block * TOGETHER);
    int first_row = (expert ? given.ends[expert - 1] : 0) + (block * TOGETHER + within % together) * ROWS;
    index += gridDim.x;
    return Tile{expert, first_row, min(given.ends[expert] - first_row, ROWS), within / together * OUTPUT_TILES};
  }
};

// One warp adds up the tiles of rows of each expert and of all experts before it.
template <int ROWS>
__device__ __forceinline__ void count_tiles(const int* ends, int experts, int* tile_ends) {
  int lane = threadIdx.x % 32, before = 0;
  for (int first = 0; first < experts; first += 32) {
    int expert = first + lane, sum = 0;
    if (expert < experts) sum = (ends[expert] - (expert ? ends[expert - 1] : 0) + ROWS - 1) / ROWS;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (expert < experts) tile_ends[expert] = before + sum;
    before += __shfl_sync(~0u, sum, 31);
  }
}
