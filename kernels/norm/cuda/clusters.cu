// Residual addition, norm and quantization, for Hopper (sm_90a). A cluster of CTAs does a row: one multiprocessor
// would take longer to read and quantize it than all of them take for a decode step's rows.
//
// A thread holds 8 values, and 16 threads a quantization group. Reads 4 bytes a value (2 more for each further row of a sum),
// writes 2, and 2 for the normalized row as it is, 1 and 1/32 for the quantized one. The latency of its loads, which are in
// flight at once, and of a barrier limits it.

#include "../../cuda/cluster_norm.cuh"
#include "../../cuda/expert_sum.cuh"

constexpr int MOST_THREADS = 256;

struct Arguments {
  // bf16, eight values an element: the rows to add, `row_stride` values apart, or
  const uint4* x;
  // what is to be added up before.
  ExpertSum experts;
  uint4* residual;
  const uint4* weight;
  // Null if the normalized rows are wanted in FP8 alone.
  uint4* plain;
  // Null if nothing is quantized.
  uint2* values;
  float* scales;
  long long row_stride;
  int width, scale_stride;
  float epsilon;
};

// The rounded value to add to the residual. CHOICES: the number of weighted rows of a sum; 0 for one row without a weight.
template <int CHOICES>
__device__ __forceinline__ Values delta(const Arguments& given, long long row, int at) {
  if constexpr (CHOICES == 0) {
    return Values::of(load(given.x + row * (given.row_stride / VALUES) + at));
  } else {
    return Values::of(add_up<CHOICES>(given.experts, row, given.width / VALUES, at));
  }
}

__device__ __forceinline__ void store_quantized(const Arguments& given, const Values& values, long long row, int at) {
  float scale = scale_of(values);
  given.values[row * (given.width / VALUES) + at] = quantize(values, scale);
  if (at % GROUP_THREADS == 0) given.scales[(long long)(at / GROUP_THREADS) * given.scale_stride + row] = scale;
}

template <int CHOICES>
__device__ __forceinline__ void norm(const Arguments& given) {
  __shared__ ClusterSum cluster;
  start_next();
  cluster.prepare();
  long long row = blockIdx.x / cluster_size();
  int at = cluster_rank() * blockDim.x + threadIdx.x;
  uint4 weight = load(given.weight + at);
  wait_for_earlier();
  uint4* residual = given.residual + row * (given.width / VALUES) + at;
  uint4 before = load(residual);
  Values added = delta<CHOICES>(given, row, at);
  uint4 normalized = add_and_normalize(cluster, added, before, residual, weight, given.width, given.epsilon);
  if (given.plain) given.plain[row * (given.width / VALUES) + at] = normalized;
  if (given.values) store_quantized(given, Values::of(normalized), row, at);
}

#define NORM(CHOICES) \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) norm_##CHOICES(const __grid_constant__ Arguments given) { norm<CHOICES>(given); }
NORM(0)
NORM(5)
NORM(6)
NORM(7)
NORM(8)
NORM(9)
