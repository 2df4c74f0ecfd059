// A tile's rows and outputs, the threads that make it, and what a CTA keeps of it in shared memory.

#pragma once

#include "tiles.cuh"

constexpr int WARPGROUP = 128, PRODUCERS = WARPGROUP / 32, SHARED_BYTES = 230000;

// A tile of ROWS rows: each of WARPGROUPS warpgroups multiplies PARTS times 64 outputs.
template <int ROWS, int WARPGROUPS, int PARTS>
struct Shape {
  static constexpr int OUTPUT_TILES = WARPGROUPS * PARTS, CONSUMERS = WARPGROUPS * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
  // A tile with no more rows than ROWS less one or more steps is made as of so many; rows are copied by boxes.
  static constexpr int STEP = WARPGROUPS == 2 ? 32 : ROWS, BOX_ROWS = ROWS > 64 ? 64 : ROWS;
  static constexpr int X_BYTES = ROWS * GROUP_INPUTS, BOX_BYTES = BOX_ROWS * GROUP_INPUTS;
  // Rows that a warp stores together, and bytes of shared memory that it needs for that.
  static constexpr int STORED = ROWS > 64 ? ROWS / 2 : ROWS, STORED_BYTES = (STORED + 15) / 16 * 16 * 32;
  static constexpr int REST_BYTES = 1024 + CONSUMERS / 32 * STORED_BYTES + MOST_EXPERTS * 4 + ROWS * 4;
  static constexpr int FIT = (SHARED_BYTES - REST_BYTES) / (X_BYTES + OUTPUT_TILES * TILE_BYTES + ROWS * 4 + 32);
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int FEW_REGISTERS = WARPGROUPS == 2 ? 40 : 64, REGISTERS = WARPGROUPS == 2 ? 232 : 104;
};

template <int ROWS, int WARPGROUPS, int PARTS>
struct Shared {
  using Of = Shape<ROWS, WARPGROUPS, PARTS>;
  u8 x[Of::STAGES][Of::X_BYTES];
  u8 weight[Of::STAGES][Of::OUTPUT_TILES][TILE_BYTES];
  // 16 outputs a row for each warp.
  uint4 rows[Of::CONSUMERS / 32][Of::STORED_BYTES / 16];
  u64 full[Of::STAGES], empty[Of::STAGES];
  // The first producer writes a tile here before the tile's first stage. It is at most STAGES tiles ahead of a consumer that
  // still stores one.
  Tile tiles[Of::STAGES + 1];
  float scales[Of::STAGES + 1][ROWS];
  int ends[MOST_EXPERTS];
  // Of the producers' next tile, by turns.
  int numbers[2];
};

// A thread's share of a tile of weights of one group, and of its scales.
struct Words {
  uint4 half[2];
  u32 scales;
};
