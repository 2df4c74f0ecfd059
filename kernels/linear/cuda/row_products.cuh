// A product of one row, for Hopper (sm_90a): weights in bfloat16 or in block-scaled FP8. Its time is that of reading the weight, and what
// is left after the wait.
//
// A CTA multiplies 16 outputs' weights, which its threads hold in registers before it waits, as the tensor cores take them. Warps share
// the inputs, 256 each: a thread has, of each unit of its two outputs, 16 consecutive bytes, and of the row 8 values, which go to shared
// memory as the products' columns.

#pragma once

#include "../../cuda/values.cuh"
#include "../../cuda/warp_products.cuh"

constexpr int OUTPUTS = 16, INPUTS = 32 * VALUES, BLOCK = 128;

struct Weight {
  // [outputs, width] bf16, or e4m3 with [ceil(outputs / 128), width / 128].
  const u8* values;
  const float* scales;
  // [outputs] bf16, the product.
  unsigned short* out;
  int width, outputs;
};

// The products' columns in shared memory.
template <bool SCALED, int THREADS>
struct Row;
template <int THREADS>
struct Row<false, THREADS> {
  uint4 values[THREADS];

  __device__ __forceinline__ void store(const Values& own) { values[threadIdx.x] = own.packed(); }
};
template <int THREADS>
struct Row<true, THREADS> {
  // Smaller and larger magnitudes.
  uint4 values[2][THREADS];

  __device__ __forceinline__ void store(const Values& own) {
    unsigned short smaller[VALUES], larger[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) smaller[i] = smaller_of(own.value[i]), larger[i] = larger_of(own.value[i]);
    values[0][threadIdx.x] = packed(smaller);
    values[1][threadIdx.x] = packed(larger);
  }
  static __device__ __forceinline__ uint4 packed(const unsigned short (&half)[VALUES]) {
    return make_uint4(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16, half[6] | half[7] << 16);
  }
};

// A thread's weights of its two outputs.
template <bool SCALED>
struct Held {
  static constexpr int UNIT = SCALED ? 64 : 32, UNITS = INPUTS / UNIT, BLOCKS = INPUTS / BLOCK;
  uint4 row[UNITS], later_row[UNITS];
  float scale[BLOCKS];

  __device__ __forceinline__ void load(const Weight& given) {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * INPUTS, output = blockIdx.x * OUTPUTS + lane / 4;
    long long bytes = (long long)given.width * (SCALED ? 1 : 2);
    const u8* from = given.values + output * bytes + first * (SCALED ? 1 : 2) + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      bool inside = first + i * UNIT < given.width;
      row[i] = inside && output < given.outputs ? load_weights(from + i * 64) : make_uint4(0, 0, 0, 0);
      later_row[i] = inside && output + 8 < given.outputs ? load_weights(from + 8 * bytes + i * 64) : make_uint4(0, 0, 0, 0);
    }
    const float* scales = given.scales + blockIdx.x * OUTPUTS / BLOCK * (given.width / BLOCK) + first / BLOCK;
#pragma unroll
    for (int i = 0; i < (SCALED ? BLOCKS : 0); i++) scale[i] = first + i * BLOCK < given.width ? load_scale(scales + i) : 0.0f;
  }

};

// The warp's share of both outputs' sums, in a quad's first thread.
template <int THREADS>
__device__ __forceinline__ void multiply(float (&total)[2], const Held<false>& held, const Row<false, THREADS>& columns) {
  // Products that do not wait for each other.
  constexpr int CHAINS = 4;
  int lane = threadIdx.x % 32;
  float sums[CHAINS][4] = {};
#pragma unroll
  for (int i = 0; i < Held<false>::UNITS; i++) {
    uint4 row = held.row[i], later_row = held.later_row[i];
    uint4 values = lane < 4 ? columns.values[threadIdx.x / 32 * 32 + i * 4 + lane] : make_uint4(0, 0, 0, 0);
    float(&sum)[4] = sums[i % CHAINS];
    multiply_bf16(sum, make_uint2(row.x, row.y), make_uint2(later_row.x, later_row.y), make_uint2(values.x, values.y));
    multiply_bf16(sum, make_uint2(row.z, row.w), make_uint2(later_row.z, later_row.w), make_uint2(values.z, values.w));
  }
#pragma unroll
  for (int i = 0; i < CHAINS; i++) total[0] += sums[i][0], total[1] += sums[i][2];
}

template <int THREADS>
__device__ __forceinline__ void multiply(float (&total)[2], const Held<true>& held, const Row<true, THREADS>& columns) {
  constexpr int UNIT = Held<true>::UNIT, UNITS = Held<true>::UNITS;
  int lane = threadIdx.x % 32, column = lane / 4;
  float sums[UNITS][4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      const uint4* from = columns.values[column % 2] + threadIdx.x / 32 * 32 + unit * 8 + lane % 4 * 2 + i / 2;
      uint4 values = column < 2 ? *from : make_uint4(0, 0, 0, 0);
      uint2 pairs = i % 2 ? make_uint2(values.z, values.w) : make_uint2(values.x, values.y);
      multiply_f16(sums[unit], unpack_e4m3(word(held.row[unit], i)), unpack_e4m3(word(held.later_row[unit], i)), pairs);
    }
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++) {
    float factor = held.scale[unit * UNIT / BLOCK];
    total[0] = fmaf(joined(sums[unit][0], sums[unit][1]), factor, total[0]);
    total[1] = fmaf(joined(sums[unit][2], sums[unit][3]), factor, total[1]);
  }
}

// All threads: the product by the columns that each thread has stored a part of, with weights that it holds. A warp reads what its own
// threads have stored.
template <bool SCALED, int THREADS>
__device__ __forceinline__ void finish(const Weight& weight, const Held<SCALED>& held, const Row<SCALED, THREADS>& columns) {
  __shared__ float sums[THREADS / 32][OUTPUTS];
  __syncwarp();
  float total[2] = {};
  multiply(total, held, columns);
  int lane = threadIdx.x % 32, output = blockIdx.x * OUTPUTS + threadIdx.x;
  if (lane % 4 == 0) sums[threadIdx.x / 32][lane / 4] = total[0], sums[threadIdx.x / 32][lane / 4 + 8] = total[1];
  __syncthreads();
  if (threadIdx.x >= OUTPUTS || output >= weight.outputs) return;
  float all = 0.0f;
  for (int i = 0; i < (int)blockDim.x / 32; i++) all += sums[i][threadIdx.x];
  weight.out[output] = (unsigned short)pack_bf16(all, 0.0f);
}
