// A thread's weights of a group of 128 inputs, and sums of their products, each multiplied by its weights' scale.

#pragma once

#include "products.cuh"

// A tile's weights of one group as a thread has them, and SCALES pairs of scales, of two outputs that are eight apart: one pair
// for the group, or one for each quarter of it, which is what a product of the tensor cores sums over.
template <int SCALES>
struct Words {
  uint4 half[2];
  u32 scales[SCALES];

  __device__ __forceinline__ void load_scales(const u8* from) {
    if constexpr (SCALES == 1) {
      scales[0] = *reinterpret_cast<const u32*>(from);
    } else {
      uint4 found = load_shared(from);
      scales[0] = found.x, scales[1] = found.y, scales[2] = found.z, scales[3] = found.w;
    }
  }

  // The operand of the product over a quarter of the inputs.
  template <bool MINIMUM>
  __device__ __forceinline__ void decoded(u32 (&a)[4], int quarter) const {
    const uint4& words = half[quarter / 2];
    decode<MINIMUM>(a, quarter % 2 ? words.z : words.x, quarter % 2 ? words.w : words.y);
  }
};

// Adds products of PRODUCTS / 2 rows to as many of the sums, from `total` on.
template <int PRODUCTS>
__device__ __forceinline__ void add_scaled(const float (&products)[PRODUCTS], u32 scales, float* total) {
  float first = __uint_as_float(scales << 16), second = __uint_as_float(scales & 0xFFFF0000u);
#pragma unroll
  for (int j = 0; j < PRODUCTS; j += 4) {
    total[j] = fmaf(products[j], first, total[j]);
    total[j + 1] = fmaf(products[j + 1], first, total[j + 1]);
    total[j + 2] = fmaf(products[j + 2], second, total[j + 2]);
    total[j + 3] = fmaf(products[j + 3], second, total[j + 3]);
  }
}

// Waits until no more than this many products are in flight; a number that the compiler knows.
__device__ __forceinline__ void wait_for_products(int pending) {
  switch (pending) {
    case 0: return wgmma_wait<0>();
    case 1: return wgmma_wait<1>();
    case 2: return wgmma_wait<2>();
    default: return wgmma_wait<3>();
  }
}

// Adds a group's products whose quarters have scales of their own. x: the rows' descriptor; load_next: called once the words have
// been decoded.
//
// A multiprocessor adds as many sums a cycle as the tensor cores have products over 32 inputs, 128: so that they work meanwhile,
// the next products, of another quarter or of the other half of many rows, are in flight while sums are added.
template <bool MINIMUM, int SUMS, class LoadNext>
__device__ __forceinline__ void add_quarters(u64 x, Words<4>& words, float (&total)[SUMS], LoadNext load_next) {
  constexpr int PIECES = SUMS > 32 ? 2 : 1, PRODUCTS = SUMS / PIECES, UNITS = 4 * PIECES;
  // By the registers that are left.
  constexpr int AHEAD = PRODUCTS > 12 ? 1 : 3;
  float products[AHEAD + 1][PRODUCTS];
  u32 a[4][4], scales[4] = {words.scales[0], words.scales[1], words.scales[2], words.scales[3]};
#pragma unroll
  for (int unit = 0; unit < UNITS + AHEAD; unit++) {
    int quarter = unit / PIECES, added = unit - AHEAD;
    if (unit < UNITS) {
      if (unit % PIECES == 0) {
        words.decoded<MINIMUM>(a[quarter], quarter);
        pin(a[quarter]);
      }
      wgmma_fence();
      // A row of a group has 128 bytes, eight units of a descriptor.
      multiply(products[unit % (AHEAD + 1)], a[quarter], x + quarter * 2 + unit % PIECES * (PRODUCTS * 2 * 8), 0);
      wgmma_commit();
    }
    if (unit == UNITS - 1) load_next();
    if (added < 0) continue;
    wait_for_products(min(unit, UNITS - 1) - added);
    pin(products[added % (AHEAD + 1)]);
    add_scaled(products[added % (AHEAD + 1)], scales[added / PIECES], total + added % PIECES * PRODUCTS);
  }
}
