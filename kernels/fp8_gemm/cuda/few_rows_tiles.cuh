// A CTA's part of a tile, and the layout of shared memory.

#pragma once

#include "../../cuda/cluster.cuh"

constexpr int UNIT = 128, GROUP_OUTPUTS = 64, GROUP_THREADS = 128, MOST_UNITS = 80;
// Shared memory of a CTA. The rest of the multiprocessor's is left to CTAs of the small kernels before and after.
constexpr int SHARED_BYTES = 216000, MOST_THREADS = 640;

struct Arguments {
  TensorMap weight, x;
  const float* x_scales;
  const float* weight_scales;
  unsigned short* out;
  int rows, outputs, units, scale_stride;
};

// OUTPUTS of a tile are a multiple of 16, in groups of 64, the last of which may be partial.
template <int ROWS, int OUTPUTS>
struct Shape {
  static constexpr int GROUPS = (OUTPUTS + GROUP_OUTPUTS - 1) / GROUP_OUTPUTS, TURNS = GROUPS < 3 ? 4 / GROUPS : 1;
  // Threads of a turn; threads that multiply; all threads.
  static constexpr int TURN = GROUPS * GROUP_THREADS, CONSUMERS = TURNS * TURN, THREADS = CONSUMERS + GROUP_THREADS;
  // Registers of a thread that multiplies and of one that copies. All threads start with 96, as many as 640 of them can have:
  // the rest is left to the small kernels too.
  static constexpr int REGISTERS = 112, FEW_REGISTERS = TURNS > 1 ? 32 : 40;
  static constexpr int WEIGHT_BYTES = OUTPUTS * UNIT, X_BYTES = ROWS * UNIT;
  // Units in flight, each with the scales of its rows and two barriers. Each turn has the same number of stages, always the
  // same ones: at a stage where another turn's unit is still in flight, it would mistake the phase before for its own.
  static constexpr int UNIT_BYTES = WEIGHT_BYTES + X_BYTES + ROWS * 4 + 16;
  static constexpr int STAGES = (SHARED_BYTES - 2 * MOST_UNITS * 4 - 8) / UNIT_BYTES / TURNS * TURNS;
  // Groups of 8 rows; bytes of a row in bf16, padded by 8 outputs so that rows lie in different banks.
  static constexpr int EIGHTS = ROWS / 8, ROW_BYTES = OUTPUTS * 2 + 16;
};

template <int ROWS, int OUTPUTS>
struct Shared {
  using Of = Shape<ROWS, OUTPUTS>;
  u8 weight[Of::STAGES][Of::WEIGHT_BYTES];
  u8 x[Of::STAGES][Of::X_BYTES];
  float x_scales[Of::STAGES][ROWS];
  // Scales of the one or two rows of blocks that the tile lies in.
  float weight_scales[2][MOST_UNITS];
  // For each stage: its unit has arrived; its products are done. Last: all parts that this CTA adds up have arrived.
  u64 full[Of::STAGES], multiplied[Of::STAGES], summed;
};

// The units of its tile that this CTA computes, every `ranks`-th one, and this warp's warpgroup.
template <int ROWS, int OUTPUTS>
struct Share {
  using Of = Shape<ROWS, OUTPUTS>;
  int count, tile, rank, ranks, warpgroup;

  // Which of the tile's groups of outputs this warpgroup multiplies, and in which turn.
  __device__ __forceinline__ int group() const { return warpgroup % Of::GROUPS; }
  __device__ __forceinline__ int turn() const { return warpgroup / Of::GROUPS; }
  // Index of this CTA's unit among all units of the tile.
  __device__ __forceinline__ int place(int unit) const { return rank + unit * ranks; }
};
