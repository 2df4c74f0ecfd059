// Sums in float32 in the order of the ranks, rounded once: they have the same bits wherever they are made.

#pragma once

#include "peers.cuh"

// A unit of bfloat16 or float32 values in float32.
struct Bf16 {
  float value[8];

  __device__ __forceinline__ void unpack(uint4 unit) {
    u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      value[2 * i] = __uint_as_float(words[i] << 16);
      value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  __device__ __forceinline__ void add(uint4 unit) {
    Bf16 more;
    more.unpack(unit);
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] += more.value[i];
  }
  __device__ __forceinline__ uint4 packed() const { return make_uint4(pair(0), pair(1), pair(2), pair(3)); }
  __device__ __forceinline__ u32 pair(int i) const {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(value[2 * i + 1]), "f"(value[2 * i]));
    return both;
  }
};

struct F32 {
  float4 value;

  __device__ __forceinline__ void unpack(uint4 unit) {
    value = make_float4(__uint_as_float(unit.x), __uint_as_float(unit.y), __uint_as_float(unit.z), __uint_as_float(unit.w));
  }
  __device__ __forceinline__ void add(uint4 unit) {
    value.x += __uint_as_float(unit.x);
    value.y += __uint_as_float(unit.y);
    value.z += __uint_as_float(unit.z);
    value.w += __uint_as_float(unit.w);
  }
  __device__ __forceinline__ uint4 packed() const {
    return make_uint4(__float_as_uint(value.x), __float_as_uint(value.y), __float_as_uint(value.z), __float_as_uint(value.w));
  }
};

// mine: this rank's values; found: the other ranks', in their order.
template <class Sum, int OTHERS>
__device__ __forceinline__ uint4 sum_in_order(const Members& members, uint4 mine, const uint4 (&found)[OTHERS]) {
  Sum sum;
  sum.unpack(members.own ? found[0] : mine);
  if (members.own == 0) sum.add(found[0]);
#pragma unroll
  for (int i = 1; i < OTHERS; i++) {
    if (i >= members.ranks - 1) break;
    if (i == members.own) sum.add(mine);
    sum.add(found[i]);
  }
  if (members.own == members.ranks - 1) sum.add(mine);
  return sum.packed();
}
