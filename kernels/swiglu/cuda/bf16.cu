// SwiGLU and quantization of bf16 rows, for Hopper (sm_90a): between the experts' products, which leave their tiles in the
// second-level cache.
//
// A thread makes 8 values, 16 of them a group. Reads 4 bytes a value, writes 1 and 1/32; for few rows bound by the latency of
// two loads, of a row's position and of its values, and of the largest of 16 lanes.

#include "../../cuda/values.cuh"

constexpr int THREADS = 256;

struct Arguments {
  // Eight to an element: a row's gates, then what they gate.
  const uint4* gate_up;
  // Null where all rows are meant, in order.
  const long long* positions;
  uint2* values;
  float* scales;
  // Rows of an expert, and of one column of its scales.
  int capacity, scale_stride;
  int width;
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ Values gated(uint4 gate, uint4 up) {
  Values gates = Values::of(gate), values = Values::of(up);
#pragma unroll
  for (int i = 0; i < VALUES; i++) values.value[i] *= silu(gates.value[i]);
  return values;
}

extern "C" __global__ void __launch_bounds__(THREADS) swiglu_quantize(const __grid_constant__ Arguments given) {
  start_next();
  wait_for_earlier();
  long long row = given.positions ? given.positions[blockIdx.x] : blockIdx.x;
  int at = blockIdx.y * THREADS + threadIdx.x, width = given.width / VALUES;
  // Whole groups are beyond the end; their threads compute another one's again, since lanes work together.
  int column = min(at, width - GROUP_THREADS + threadIdx.x % GROUP_THREADS);
  const uint4* gate = given.gate_up + row * 2 * width + column;
  uint4 gates = load(gate), up = load(gate + width);
  Values values = gated(gates, up);
  float scale = scale_of(values);
  if (at >= width) return;
  given.values[row * width + at] = quantize(values, scale);
  if (at % GROUP_THREADS) return;
  long long group = row / given.capacity * (width / GROUP_THREADS) + at / GROUP_THREADS;
  given.scales[group * given.scale_stride + row % given.capacity] = scale;
}
