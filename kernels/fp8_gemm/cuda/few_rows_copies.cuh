// Copies units of the weight, of activations and of their scales into a ring: the role of one thread.

#pragma once

#include "few_rows_tiles.cuh"

template <int ROWS, int OUTPUTS>
struct Copier {
  using Of = Shape<ROWS, OUTPUTS>;
  Shared<ROWS, OUTPUTS>& shared;
  const Arguments& given;
  Share<ROWS, OUTPUTS> own;

  // Initializes barriers and starts copying the first weights. Other threads load the weight's scales meanwhile: requested
  // after weights, which fill all queues, scales would arrive 3 us later.
  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == Of::CONSUMERS) {
      for (int i = 0; i < Of::STAGES; i++) {
        init_barrier(&shared.full[i], 1);
        init_barrier(&shared.multiplied[i], Of::TURN / 32);
      }
      init_barrier(&shared.summed, 1);
      fence_barrier_init();
      fence_async_proxy();
      for (int unit = 0; unit < min(Of::STAGES, own.count); unit++) copy_weight(unit);
      prefetch_map(given.x);
      int own_eights = (Of::EIGHTS - own.rank + own.ranks - 1) / own.ranks;
      arrive_and_expect(&shared.summed, own.ranks * own_eights * Of::TURN * 16);
    }
    int first = own.tile * OUTPUTS / UNIT, last = (given.outputs - 1) / UNIT;
    for (int i = threadIdx.x; i < 2 * own.count; i += Of::THREADS) {
      int block = min(first + i / own.count, last), unit = i % own.count;
      shared.weight_scales[i / own.count][unit] = given.weight_scales[block * given.units + own.place(unit)];
    }
    __syncthreads();
  }

  __device__ __forceinline__ u32 scale_bytes() const { return min(ROWS, given.scale_stride) * 4; }

  __device__ __forceinline__ void copy_weight(int unit) const {
    int stage = unit % Of::STAGES;
    u64* full = &shared.full[stage];
    arrive_and_expect(full, Of::WEIGHT_BYTES + Of::X_BYTES + scale_bytes());
    int column = own.place(unit) * UNIT, row = own.tile * OUTPUTS;
    if constexpr (Of::TURNS == 1) copy_box_once(shared.weight[stage], given.weight, column, row, full);
    else copy_box(shared.weight[stage], given.weight, column, row, full);
  }

  __device__ __forceinline__ void copy_activations(int unit) const {
    int stage = unit % Of::STAGES, at = own.place(unit);
    u64* full = &shared.full[stage];
    copy_box(shared.x[stage], given.x, at * UNIT, 0, full);
    copy_run(shared.x_scales[stage], given.x_scales + (long long)at * given.scale_stride, scale_bytes(), full);
  }

  // Once the previous kernel has ended, copies the activations of the ring's first units; then each further unit as soon as its
  // stage is free.
  __device__ __forceinline__ void produce() const {
    wait_for_earlier();
    for (int unit = 0; unit < min(Of::STAGES, own.count); unit++) copy_activations(unit);
    for (int unit = Of::STAGES; unit < own.count; unit++) {
      wait(&shared.multiplied[unit % Of::STAGES], (unit / Of::STAGES - 1) & 1);
      copy_weight(unit);
      copy_activations(unit);
    }
  }
};
