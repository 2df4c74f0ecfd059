// Which tiles a cluster computes, the layout of shared memory, and the copies into it.

#pragma once

#include "../../cuda/cluster.cuh"

// Rows of the weight of a CTA, and inputs of a stage, which are 128 bytes; bytes of all stages.
constexpr int LINES = 128, INPUTS = 64, INPUT_BYTES = 128, RING_BYTES = 192 << 10;
// Rows of a copy of activations, of which the CTAs of a cluster take turns, and of which tiles have a multiple.
constexpr int BOX_ROWS = 32, ROWS_STEP = 16, CTAS = 2;
constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = 384, CONSUMER_LINES = 64;
constexpr int MOST_GROUPS = 512;
// Row tiles of one expert that are taken together, with all outputs.
constexpr int ROWS_TOGETHER = 8;

struct Arguments {
  // Boxes of 64 inputs of 32 rows.
  TensorMap x;
  // Boxes of 64 inputs of 128 rows of [experts * outputs]; or, if gated, of eight times eight rows of both halves.
  TensorMap weight;
  // [rows, outputs] in bf16, and where each expert's rows end.
  unsigned short* out;
  const int* ends;
  int groups, outputs, blocks;
};

// MOST_ROWS: of activations in a tile.
template <int MOST_ROWS>
struct Shared {
  static constexpr int STAGES = RING_BYTES / ((LINES + MOST_ROWS) * INPUT_BYTES);

  u8 x[STAGES][MOST_ROWS * INPUT_BYTES];
  u8 weight[STAGES][LINES * INPUT_BYTES];
  // 64 rows of a warpgroup's outputs, on their way to memory.
  u8 out[CONSUMERS][64 * INPUT_BYTES];
  // Where each expert's rows end, and its row tiles.
  int ends[MOST_GROUPS], tile_ends[MOST_GROUPS];
  u64 full[STAGES], empty[STAGES];

  __device__ __forceinline__ void prepare() {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(&full[stage], 1);
      // Each warp that computes, of both CTAs: either one writes here.
      init_barrier(&empty[stage], CTAS * CONSUMERS * WARPGROUP / 32);
    }
    fence_barrier_init();
  }

  __device__ __forceinline__ void count_tiles(const Arguments& given) {
    for (int at = threadIdx.x; at < given.groups; at += THREADS) ends[at] = __ldcg(given.ends + at);
    __syncthreads();
    if (threadIdx.x == 0) {
      int tiles = 0, start = 0;
      for (int at = 0; at < given.groups; at++) {
        tiles += (ends[at] - start + MOST_ROWS - 1) / MOST_ROWS;
        start = ends[at];
        tile_ends[at] = tiles;
      }
    }
    __syncthreads();
  }
};

// The tile of a CTA: rows [first_row, stop) of one expert. `rows`, a multiple of ROWS_STEP, are multiplied.
struct Tile {
  int group, first_row, stop, rows, first_output;
};

// The tiles of a cluster, one after another. Its CTAs' lie side by side. OUTPUTS: of a CTA.
template <int OUTPUTS, int MOST_ROWS>
struct Tiles {
  const Shared<MOST_ROWS>& shared;
  const Arguments& given;
  int index = blockIdx.x / CTAS, group = 0;

  __device__ __forceinline__ static int whole_steps(int rows) { return (rows + ROWS_STEP - 1) / ROWS_STEP * ROWS_STEP; }

  // Returns whether there is one more.
  __device__ __forceinline__ bool next(Tile& tile) {
    int across = (given.outputs + CTAS * OUTPUTS - 1) / (CTAS * OUTPUTS);
    while (group < given.groups && index >= shared.tile_ends[group] * across) group++;
    if (group == given.groups) return false;
    int first_tile = group ? shared.tile_ends[group - 1] : 0, down = shared.tile_ends[group] - first_tile;
    int start = group ? shared.ends[group - 1] : 0;
    int at = index - first_tile * across, part = at / (ROWS_TOGETHER * across), within = at % (ROWS_TOGETHER * across);
    int together = min(ROWS_TOGETHER, down - part * ROWS_TOGETHER);
    tile.group = group;
    // Tiles of about as many rows: one of few rows takes as long as bringing its weight.
    int each = whole_steps((shared.ends[group] - start + down - 1) / down);
    tile.first_row = start + (part * ROWS_TOGETHER + within % together) * each;
    tile.stop = min(tile.first_row + each, shared.ends[group]);
    tile.rows = whole_steps(tile.stop - tile.first_row);
    tile.first_output = (within / together * CTAS + blockIdx.x % CTAS) * OUTPUTS;
    index += gridDim.x / CTAS;
    return true;
  }
};

// Copies a box of [inputs, eight rows, both halves, every eighth row, experts].
__device__ __forceinline__ void copy_box_of_both(void* target, const TensorMap& map, int column, int eight, int expert, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4, %5}], [%6];"
      ::"r"(shared_address(target)), "l"(&map), "r"(column), "r"(0), "r"(eight), "r"(expert), "r"(shared_address(barrier)) : "memory");
}

// The role of one thread.
template <bool GATED, int MOST_ROWS>
__device__ __forceinline__ void copy_operands(Shared<MOST_ROWS>& shared, const Arguments& given) {
  Tiles<GATED ? LINES / 2 : LINES, MOST_ROWS> tiles{shared, given};
  Turn<Shared<MOST_ROWS>::STAGES> turn;
  Tile tile;
  int rank = blockIdx.x % CTAS;
  while (tiles.next(tile)) {
#pragma unroll 1
    for (int block = 0; block < given.blocks; block++, turn.advance()) {
      u64* full = &shared.full[turn.stage];
      wait(&shared.empty[turn.stage], turn.phase ^ 1);
      int copied = (tile.rows + BOX_ROWS - 1) / BOX_ROWS * BOX_ROWS;
      arrive_and_expect(full, (LINES + copied) * INPUT_BYTES);
      u8* weight = shared.weight[turn.stage];
      if (GATED) copy_box_of_both(weight, given.weight, block * INPUT_BYTES, tile.first_output / 8, tile.group, full);
      else copy_box(weight, given.weight, block * INPUT_BYTES, tile.group * given.outputs + tile.first_output, full);
#pragma unroll 1
      for (int at = rank * BOX_ROWS; at < tile.rows; at += CTAS * BOX_ROWS)
        copy_box_to<CTAS>(shared.x[turn.stage] + at * INPUT_BYTES, given.x, block * INPUT_BYTES, tile.first_row + at, full, (1 << CTAS) - 1);
    }
  }
}
