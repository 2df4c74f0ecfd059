// A linear layer of one row with long inputs, such as attention's output, for Hopper (sm_90a): bf16 products, summed in float32. All
// CTAs are resident at once, two a multiprocessor, and hold all weights in registers, which they load while the kernels before still
// run (programmatic dependent launch). What is left after the wait is the latency of one load, of a sum over the CTA's threads and of
// a store. Reads 2 bytes a weight once, and the row once a CTA from the second-level cache.

#include "../../cuda/values.cuh"

// A CTA has some outputs, and each half of its threads half of them. A thread has PIECES pieces of 8 inputs, every 128th one.
constexpr int HALF = 128, THREADS = 2 * HALF, OUTPUTS = 8, OWN = OUTPUTS / 2, WARPS = HALF / 32;

struct Arguments {
  const uint4 *x, *weight;
  unsigned short* out;
};

template <int PIECES>
__device__ __forceinline__ void multiply_row(const Arguments& given) {
  __shared__ float sums[OUTPUTS][WARPS];
  start_next();
  int half = threadIdx.x / HALF, at = threadIdx.x % HALF, lane = at % 32;
  long long first = (long long)blockIdx.x * OUTPUTS + half * OWN;
  uint4 held[OWN][PIECES];
#pragma unroll
  for (int output = 0; output < OWN; output++)
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
      held[output][piece] = load(given.weight + (first + output) * (PIECES * HALF) + piece * HALF + at);
  wait_for_earlier();
  uint4 row[PIECES];
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) row[piece] = load(given.x + piece * HALF + at);
  float sum[OWN] = {};
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) {
    Values x = Values::of(row[piece]);
#pragma unroll
    for (int output = 0; output < OWN; output++) {
      Values weight = Values::of(held[output][piece]);
#pragma unroll
      for (int i = 0; i < VALUES; i++) sum[output] = fmaf(weight.value[i], x.value[i], sum[output]);
    }
  }
#pragma unroll
  for (int output = 0; output < OWN; output++) {
#pragma unroll
    for (int step = 16; step; step /= 2) sum[output] += __shfl_xor_sync(~0u, sum[output], step);
    if (lane == 0) sums[half * OWN + output][at / 32] = sum[output];
  }
  __syncthreads();
  if (threadIdx.x >= OUTPUTS) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += sums[threadIdx.x][i];
  given.out[blockIdx.x * OUTPUTS + threadIdx.x] = pack_bf16(total, 0.0f);
}

// Of 5,120 inputs: 20 heads of 256.
extern "C" __global__ void __launch_bounds__(THREADS, 2) multiply_row_5(const __grid_constant__ Arguments given) {
  multiply_row<5>(given);
}
