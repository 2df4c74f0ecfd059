// SwiGLU and quantization of bf16 rows, for Hopper (sm_90a). It runs between the experts' products, whose tiles it finds in the
// second-level cache.
//
// A thread computes 8 values, and 16 threads a quantization group. Reads 4 bytes a value, writes 1 and 1/32. For few rows
// latency limits it: of loading a row's position, of loading its values, and of the maximum over 16 lanes.

#include "../../cuda/values.cuh"

constexpr int THREADS = 256;

struct Arguments {
  // Eight values an element: a row's gates, then the values that they gate.
  const uint4* gate_up;
  // The rows to compute, negative for none; null for all rows in order.
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
  if (row < 0) return;
  int at = blockIdx.y * THREADS + threadIdx.x, width = given.width / VALUES;
  // Only whole groups lie beyond the end. Their threads compute another group again, since lanes work together.
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
