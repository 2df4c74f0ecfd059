// A linear layer for one row: see row_products.cuh.

#include "row_products.cuh"

// As many warps as there are 256 inputs, at most.
constexpr int MOST_THREADS = 640;

struct Arguments {
  Weight weight;
  // bf16, eight values an element.
  const uint4* x;
};

template <bool SCALED>
__device__ __forceinline__ void run(const Arguments& given) {
  __shared__ Row<SCALED, MOST_THREADS> columns;
  start_next();
  Held<SCALED> held;
  held.load(given.weight);
  wait_for_earlier();
  bool inside = threadIdx.x * VALUES < given.weight.width;
  columns.store(Values::of(inside ? load(given.x + threadIdx.x) : make_uint4(0, 0, 0, 0)));
  finish(given.weight, held, columns);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) multiply_row(const __grid_constant__ Arguments given) { run<false>(given); }
extern "C" __global__ void __launch_bounds__(MOST_THREADS) multiply_row_scaled(const __grid_constant__ Arguments given) { run<true>(given); }
