// The indexer's keys and queries: norm, rotation, Hadamard matrix and quantization to e4m3 of rows of 128 values (sm_90).
//
// A warp computes a row, of which each lane has four values. The product with Sylvester's matrix is seven rounds of sums and
// differences, two within a lane and five between lanes, in the order of the reference. Reads 2 bytes a value and writes one.

#include "../../cuda/hopper.cuh"

constexpr int WIDTH = 128, OWN = WIDTH / 32, THREADS = 256, WARPS = THREADS / 32, BLOCK = 64;
// A block of the pool: its keys, then their scales.
constexpr int BLOCK_BYTES = BLOCK * (WIDTH + 4);
// The smallest magnitude that a scale stands for, and one over the root of the width.
constexpr float SMALLEST_LARGEST = 1e-4f, SHRINK = 0.08838834764831845f;

struct Rows {
  // [rows, 128] bf16, of which `stride` u64 lie between the beginnings of two.
  const u64* projected;
  // [tokens, pairs] complex64
  const float* turns;
  int rows, stride, pairs;
  // Whether numbers next to each other are a pair, or else those `pairs` apart.
  bool interleaved;
};

struct KeyArguments {
  Rows rows;
  // [128]
  const float *weight, *bias;
  const long long* slots;
  u8* pool;
  float epsilon;
};

struct QueryArguments {
  Rows rows;
  // [shares, rows]
  const float* weights;
  // [rows, 128] e4m3; [rows]
  u32* values;
  float* scaled;
  int heads, shares;
  // What the sum over the shares counts.
  float factor;
};

struct Row {
  float value[OWN];
};

__device__ __forceinline__ float add_lanes(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ Row load_row(const Rows& rows, int row) {
  u64 packed = rows.projected[(long long)row * rows.stride + threadIdx.x % 32];
  u32 low = (u32)packed, high = (u32)(packed >> 32);
  return {__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u), __uint_as_float(high << 16), __uint_as_float(high & 0xFFFF0000u)};
}

// Mean and variance to zero and one, then weight and bias.
__device__ __forceinline__ void normalize(Row& row, const float4& weight, const float4& bias, float epsilon) {
  float mean = add_lanes((row.value[0] + row.value[1]) + (row.value[2] + row.value[3])) / WIDTH, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; i++) squares += (row.value[i] - mean) * (row.value[i] - mean);
  float factor = 1.0f / sqrtf(add_lanes(squares) / WIDTH + epsilon);
  float weights[OWN] = {weight.x, weight.y, weight.z, weight.w}, biases[OWN] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
  for (int i = 0; i < OWN; i++) row.value[i] = (row.value[i] - mean) * factor * weights[i] + biases[i];
}

__device__ __forceinline__ void rotate(Row& row, const Rows& rows, int token) {
  int lane = threadIdx.x % 32, half = rows.pairs / OWN;
  const float2* turns = reinterpret_cast<const float2*>(rows.turns) + (long long)token * rows.pairs;
  bool rotated = lane < 2 * half;
  if (rows.interleaved) {
#pragma unroll
    for (int i = 0; i < OWN; i += 2) {
      float2 turn = rotated ? turns[lane * 2 + i / 2] : make_float2(1.0f, 0.0f);
      float first = row.value[i], second = row.value[i + 1];
      row.value[i] = first * turn.x - second * turn.y;
      row.value[i + 1] = first * turn.y + second * turn.x;
    }
    return;
  }
  bool is_second = lane >= half;
  int partner = (is_second ? lane - half : lane + half) % 32, pair = (is_second ? lane - half : lane) * OWN;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    float other = __shfl_sync(~0u, row.value[i], partner);
    float2 turn = rotated ? turns[pair + i] : make_float2(1.0f, 0.0f);
    row.value[i] = row.value[i] * turn.x + (is_second ? other : -other) * turn.y;
  }
}

// Multiplies by the Hadamard matrix over the root of the width.
__device__ __forceinline__ void spread(Row& row) {
  float(&x)[OWN] = row.value;
  float sums[OWN] = {x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]};
  x[0] = sums[0] + sums[2];
  x[1] = sums[1] + sums[3];
  x[2] = sums[0] - sums[2];
  x[3] = sums[1] - sums[3];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = threadIdx.x & step ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) x[i] *= SHRINK;
}

// Returns the row's values in e4m3, of which the lane has four, and sets its scale: the least power of two that brings the
// largest magnitude to at most 448.
__device__ __forceinline__ u32 quantize(const Row& row, float& scale) {
  float largest = SMALLEST_LARGEST;
#pragma unroll
  for (int i = 0; i < OWN; i++) largest = fmaxf(largest, fabsf(row.value[i]));
#pragma unroll
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  scale = least_power(__fdiv_rn(largest, LARGEST_E4M3));
  float inverse = 1.0f / scale;
  return pack_e4m3(row.value[0] * inverse, row.value[1] * inverse) | pack_e4m3(row.value[2] * inverse, row.value[3] * inverse) << 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) write_keys(const __grid_constant__ KeyArguments given) {
  int token = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  // The model's weights are older than the previous kernel.
  float4 weight = reinterpret_cast<const float4*>(given.weight)[lane], bias = reinterpret_cast<const float4*>(given.bias)[lane];
  wait_for_earlier();
  start_next();
  if (token >= given.rows.rows) return;
  Row row = load_row(given.rows, token);
  normalize(row, weight, bias, given.epsilon);
  rotate(row, given.rows, token);
  spread(row);
  float scale;
  u32 codes = quantize(row, scale);
  long long slot = given.slots[token], place = slot % BLOCK;
  u8* block = given.pool + slot / BLOCK * BLOCK_BYTES;
  reinterpret_cast<u32*>(block + place * WIDTH)[lane] = codes;
  if (lane == 0) reinterpret_cast<float*>(block + BLOCK * WIDTH)[place] = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS) make_queries(const __grid_constant__ QueryArguments given) {
  int number = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_earlier();
  start_next();
  if (number >= given.rows.rows) return;
  float share = lane < given.shares ? given.weights[(long long)lane * given.rows.rows + number] : 0.0f;
  Row row = load_row(given.rows, number);
  rotate(row, given.rows, number / given.heads);
  spread(row);
  float scale;
  given.values[(long long)number * 32 + lane] = quantize(row, scale);
  float weight = add_lanes(share) * given.factor;
  if (lane == 0) given.scaled[number] = weight * scale;
}
