// A tile's rows and outputs, the threads that make it, and what a CTA keeps of it in shared memory.

#pragma once

#include "tiles.cuh"

constexpr int WARPGROUP = 128, PRODUCERS = WARPGROUP / 32, SHARED_BYTES = 230000;

// A tile of ROWS rows: each of WARPGROUPS warpgroups multiplies PARTS times 64 outputs over every TURNS-th group of inputs. With
// turns PARTS is 1, and both products' groups divide into them: a turn always has the same stages.
template <int ROWS, int WARPGROUPS, int PARTS, int TURNS, int SCALES>
struct Shape {
  // Warpgroups of a turn, and tiles of 64 outputs.
  static constexpr int TURN = WARPGROUPS / TURNS, OUTPUT_TILES = TURN * PARTS;
  // A tile has this many scales of each output, each over its part of the tile's inputs.
  static constexpr int TILE_BYTES = WEIGHT_BYTES + SCALES * SCALE_BYTES;
  static constexpr int CONSUMERS = WARPGROUPS * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
  // The fewest rows that are multiplied: a tile with fewer than ROWS is made as one of as many eights as it needs, from 64 rows on
  // of as many times 32. Turns add up sums of whole tiles. Rows are copied by boxes.
  static constexpr int LEAST = WARPGROUPS == 2 ? 24 : TURNS == 1 ? 8 : ROWS, BOX_ROWS = ROWS > 64 ? 64 : ROWS;
  static constexpr int X_BYTES = ROWS * GROUP_INPUTS, BOX_BYTES = BOX_ROWS * GROUP_INPUTS;
  // Rows that a warp stores together, and bytes of shared memory that it needs for that.
  static constexpr int STORED = ROWS > 64 ? ROWS / 2 : ROWS, STORED_BYTES = (STORED + 15) / 16 * 16 * 32;
  // A thread's sums; bytes of those of all turns but the first, for two tiles.
  static constexpr int QUADS = ROWS / 8, SUMS_BYTES = 2 * (TURNS - 1) * TURN * WARPGROUP * QUADS * 16;
  static constexpr int REST_BYTES = 1024 + CONSUMERS / 32 * STORED_BYTES + MOST_EXPERTS * 4 + ROWS * 4 + SUMS_BYTES;
  static constexpr int FIT = (SHARED_BYTES - REST_BYTES) / (X_BYTES + OUTPUT_TILES * TILE_BYTES + ROWS * 4 + 64);
  static constexpr int MOST_STAGES = TURNS > 1 ? 24 : 12, STAGES = (FIT < MOST_STAGES ? FIT : MOST_STAGES) / TURNS * TURNS;
  static constexpr int FEW_REGISTERS = WARPGROUPS == 2 ? 40 : 64, REGISTERS = WARPGROUPS == 2 ? 232 : 104;
};

template <int ROWS, int WARPGROUPS, int PARTS, int TURNS, int SCALES>
struct Shared {
  using Of = Shape<ROWS, WARPGROUPS, PARTS, TURNS, SCALES>;
  u8 x[Of::STAGES][Of::X_BYTES];
  u8 weight[Of::STAGES][Of::OUTPUT_TILES][Of::TILE_BYTES];
  // 16 outputs a row for each warp.
  uint4 rows[Of::CONSUMERS / 32][Of::STORED_BYTES / 16];
  u64 full[Of::STAGES], empty[Of::STAGES];
  // The first producer writes a tile here before the tile's first stage. It is at most STAGES tiles ahead of a consumer that
  // still stores one.
  Tile tiles[Of::STAGES + 1];
  float scales[Of::STAGES + 1][ROWS];
  int ends[MOST_EXPERTS];
  // The number of the producers' next tile, in one place and in the other by turns.
  int numbers[2];
  // By tile of two, turn, and thread of a turn. There are no empty arrays.
  float4 sums[2][TURNS > 1 ? TURNS - 1 : 1][TURNS > 1 ? Of::QUADS : 1][TURNS > 1 ? Of::TURN * WARPGROUP : 1];
};
