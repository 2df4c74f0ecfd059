// Multiplies 64 of a tile's outputs by its rows, unit by unit: the role of each warpgroup but the one that copies.

#pragma once

#include "few_rows_tiles.cuh"
#include "multiply.cuh"

template <int ROWS, int OUTPUTS>
struct Multiplier {
  using Of = Shape<ROWS, OUTPUTS>;
  Shared<ROWS, OUTPUTS>& shared;
  Share<ROWS, OUTPUTS> own;

  // Issues a unit's products, and does not wait. Descriptors count in 16 bytes. They stay in uniform registers because `own` is
  // the same for a whole warp; from ordinary registers, each product would wait for four moves after the one before.
  __device__ __forceinline__ void begin(int unit, float (&products)[ROWS / 2]) const {
    int stage = unit % Of::STAGES;
    u64 weight = descriptor<1>(shared_address(shared.weight) + own.group() * (GROUP_OUTPUTS * UNIT));
    u64 x = descriptor<1>(shared_address(shared.x)) + stage * (Of::X_BYTES / 16);
    weight += stage * (Of::WEIGHT_BYTES / 16);
    wait(&shared.full[stage], unit / Of::STAGES & 1);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < UNIT / 32; step++) multiply(products, weight + step * 2, x + step * 2, step > 0);
    wgmma_commit();
  }

  // Whether this warp's 16 outputs lie in the tile's first row of blocks, 0, or its second, 1.
  __device__ __forceinline__ int block() const {
    int first = own.tile * OUTPUTS;
    return min((first + threadIdx.x % Of::TURN / 32 * 16) / UNIT - first / UNIT, 1);
  }

  // Scales a unit's products and adds them to the total.
  __device__ __forceinline__ void finish(int unit, float (&products)[ROWS / 2], float (&total)[ROWS / 2]) const {
    int stage = unit % Of::STAGES;
    pin(products);
    const float2* scales = reinterpret_cast<const float2*>(shared.x_scales[stage]) + threadIdx.x % 4;
    float weight_scale = shared.weight_scales[block()][unit];
#pragma unroll
    for (int j = 0; j < Of::EIGHTS; j++) {
      float2 both = scales[j * 4];
      float first = both.x * weight_scale, second = both.y * weight_scale;
      total[j * 4] = fmaf(products[j * 4], first, total[j * 4]);
      total[j * 4 + 1] = fmaf(products[j * 4 + 1], second, total[j * 4 + 1]);
      total[j * 4 + 2] = fmaf(products[j * 4 + 2], first, total[j * 4 + 2]);
      total[j * 4 + 3] = fmaf(products[j * 4 + 3], second, total[j * 4 + 3]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.multiplied[stage]);
  }

  // Sums the tile over this turn's units. A thread's element j * 4 + h * 2 + i is row j * 8 + lane % 4 * 2 + i and output
  // warp * 16 + h * 8 + lane / 4.
  __device__ __forceinline__ void multiply_units(float (&total)[ROWS / 2]) const {
#pragma unroll 1
    for (int unit = own.turn(); unit < own.count; unit += Of::TURNS) {
      float products[ROWS / 2];
      begin(unit, products);
      wgmma_wait<0>();
      finish(unit, products, total);
    }
  }
};
