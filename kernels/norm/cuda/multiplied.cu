// Norm and a product of one row, perhaps after residual addition and the experts' sum, for Hopper (sm_90a).
//
// Each CTA adds up and normalizes the row for itself: that takes less time than to meet. So the sums go to another place than they come
// from. The product is that of kernels/linear/cuda/row_products.cuh.

#include "../../linear/cuda/row_products.cuh"

constexpr int MOST_THREADS = 256;
// The most rows of a sum.
constexpr int MOST_ROWS = 9;

struct Arguments {
  Weight weight;
  // bf16, eight values an element: the row, or `rows` rows to be added up, each `factors` times, if `positions` has it: [places].
  const uint4* delta;
  const long long* positions;
  const float* factors;
  // Null if nothing is added: then neither is `added`.
  const uint4* residual;
  uint4* added;
  // The norm's.
  const uint4* norm;
  int rows, places;
  float epsilon;
};

// The thread's part of the row. All loads are in flight at once; which of the rows a choice has is found meanwhile.
__device__ __forceinline__ Values summed(const Arguments& given, bool inside) {
  int lane = threadIdx.x % 32;
  uint4 before = {}, found[MOST_ROWS];
  if (inside && given.residual) before = load(given.residual + threadIdx.x);
#pragma unroll
  for (int i = 0; i < MOST_ROWS; i++)
    found[i] = inside && i < max(given.rows, 1) ? load(given.delta + i * (given.weight.width / VALUES) + threadIdx.x) : make_uint4(0, 0, 0, 0);
  Values sum = {};
  if (given.rows) {
    long long position = lane < given.places ? given.positions[lane] : -1;
    float factor = lane < given.places ? given.factors[lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_ROWS; i++) {
      u32 used = __ballot_sync(~0u, position == i);
      float own = __shfl_sync(~0u, factor, used ? __ffs(used) - 1 : 0);
      // A row that no choice has was not written.
      if (used) sum.add(Values::of(found[i]), own);
    }
    sum = Values::of(sum.packed());
  } else {
    sum = Values::of(found[0]);
  }
  if (!given.residual) return sum;
  sum.add(Values::of(before), 1.0f);
  return Values::of(sum.packed());
}

// All threads: normalized, rounded twice, as the reference does: after normalizing and after multiplying.
__device__ __forceinline__ Values normalized(const Arguments& given, Values sum, uint4 weight, float* squares) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; i++) square = fmaf(sum.value[i], sum.value[i], square);
#pragma unroll
  for (int step = 16; step; step /= 2) square += __shfl_xor_sync(~0u, square, step);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  square = 0.0f;
  for (int i = 0; i < (int)blockDim.x / 32; i++) square += squares[i];
  float scale = rsqrtf(square / given.weight.width + given.epsilon);
  Values factors = Values::of(weight);
#pragma unroll
  for (int i = 0; i < VALUES; i++) sum.value[i] *= scale;
  sum = Values::of(sum.packed());
#pragma unroll
  for (int i = 0; i < VALUES; i++) sum.value[i] *= factors.value[i];
  return Values::of(sum.packed());
}

template <bool SCALED>
__device__ __forceinline__ void run(const Arguments& given) {
  __shared__ Row<SCALED, MOST_THREADS> columns;
  __shared__ float squares[MOST_THREADS / 32];
  start_next();
  Held<SCALED> held;
  held.load(given.weight);
  bool inside = threadIdx.x * VALUES < given.weight.width;
  uint4 norm = inside ? load(given.norm + threadIdx.x) : make_uint4(0, 0, 0, 0);
  wait_for_earlier();
  Values sum = summed(given, inside);
  if (inside && given.residual && blockIdx.x == 0) given.added[threadIdx.x] = sum.packed();
  columns.store(normalized(given, sum, norm, squares));
  finish(given.weight, held, columns);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) multiplied(const __grid_constant__ Arguments given) { run<false>(given); }
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) multiplied_scaled(const __grid_constant__ Arguments given) { run<true>(given); }
