// Which tiles a cluster computes, and the layout of shared memory.

#pragma once

#include "../../cuda/cluster.cuh"

// Rows of a tile, and inputs that have one scale.
constexpr int ROWS = 128, BLOCK = 128;
// CTAs of a cluster, which compute tiles side by side.
constexpr int CTAS = 2;
// Each of the two warpgroups that compute has half of a tile's rows.
constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP, HALF_ROWS = ROWS / CONSUMERS;
constexpr int X_BYTES = ROWS * BLOCK, SHARED_BYTES = 232448;

struct Arguments {
  // Boxes of 128 inputs: of 64 rows, and of up to 128 outputs.
  TensorMap x, weight;
  // Boxes of 64 outputs of 64 rows, in bf16.
  TensorMap out;
  // [blocks, scale_stride] and [experts * outputs / 128, blocks].
  const float* x_scales;
  const float* weight_scales;
  // Each row's expert if rows are sorted; less than 0 for padding.
  const int* row_experts;
  int rows, outputs, blocks, scale_stride;
  // How many rows of tiles are taken together.
  int rows_together;
};

template <int WIDTH>
struct Shared {
  static constexpr int WEIGHT_BYTES = WIDTH * BLOCK, OUT_BYTES = HALF_ROWS * WIDTH * 2;
  static constexpr int WEIGHT_BOX = WIDTH < BLOCK ? WIDTH : BLOCK, WEIGHT_SCALES = WIDTH / WEIGHT_BOX;
  static constexpr int STAGES = (SHARED_BYTES - CONSUMERS * OUT_BYTES) / (X_BYTES + WEIGHT_BYTES + (ROWS + WEIGHT_SCALES) * 4 + 16);
  u8 x[STAGES][X_BYTES];
  u8 weight[STAGES][WEIGHT_BYTES];
  // A warpgroup's sums on their way to memory.
  u8 out[CONSUMERS][OUT_BYTES];
  float x_scales[STAGES][ROWS];
  float weight_scales[STAGES][WEIGHT_SCALES];
  u64 full[STAGES], empty[STAGES];

  __device__ __forceinline__ void prepare() {
    for (int stage = 0; stage < STAGES; stage++) {
      // The thread that copies operands, and the warp that copies scales.
      init_barrier(&full[stage], 1 + 32);
      // Each warp that computes, of both CTAs: either one writes here.
      init_barrier(&empty[stage], CTAS * CONSUMERS * WARPGROUP / 32);
    }
    fence_barrier_init();
  }
};

__device__ __forceinline__ int ceiling(int size, int part) { return (size + part - 1) / part; }

// The tile that this CTA computes.
struct Tile {
  int first_row, first_output, expert;
  // Whether the neighbour's tile has the same outputs of the same expert.
  bool shares_weight;
};

// The tiles of a cluster, one after another. Its CTAs' tiles lie side by side, and wide ones one below the other.
template <int WIDTH, bool SORTED>
struct Tiles {
  static constexpr bool BELOW = WIDTH > BLOCK;
  static constexpr int DOWN = BELOW ? CTAS : 1, ACROSS = BELOW ? 1 : CTAS;
  const Arguments& given;
  int index = blockIdx.x / CTAS, rank = blockIdx.x % CTAS;

  // Returns whether there is one more.
  __device__ __forceinline__ bool next(Tile& tile) {
    int down = ceiling(given.rows, DOWN * ROWS), across = ceiling(given.outputs, ACROSS * WIDTH);
    for (; index < down * across; index += gridDim.x / CTAS) {
      int group = index / (given.rows_together * across), at = index % (given.rows_together * across);
      int together = min(given.rows_together, down - group * given.rows_together);
      int row_tile = (group * given.rows_together + at % together) * DOWN;
      tile.first_row = (row_tile + (BELOW ? rank : 0)) * ROWS;
      tile.first_output = (at / together * ACROSS + (BELOW ? 0 : rank)) * WIDTH;
      tile.expert = expert_of(tile.first_row);
      tile.shares_weight = BELOW;
      if (SORTED && BELOW) {
        int neighbour = expert_of((row_tile + 1 - rank) * ROWS);
        if (tile.expert < 0) tile.expert = neighbour;
        tile.shares_weight = neighbour < 0 || tile.expert == neighbour;
      }
      if (tile.expert < 0) continue;
      index += gridDim.x / CTAS;
      return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ int expert_of(int row) const {
    if (!SORTED) return 0;
    return row < given.rows ? __ldg(given.row_experts + row) : -1;
  }
};

// Blocks that are multiplied in a step: if the last one has fewer, the rest are zero.
template <int WIDTH>
constexpr int STEP = WIDTH > BLOCK ? 1 : 4;
template <int WIDTH>
__device__ __forceinline__ int blocks_of(int blocks) { return ceiling(blocks, STEP<WIDTH>) * STEP<WIDTH>; }
