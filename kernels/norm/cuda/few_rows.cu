// The residual's addition, norm and quantization of few rows, for Hopper (sm_90a): a cluster of CTAs does a row, since one
// multiprocessor alone would take longer to read and to quantize it than all of them take for a decode step's rows.
//
// A thread holds 8 values, 16 of them a group. Reads 4 bytes a value (2 more for each further row of a sum), writes 4 (and
// 1 and 1/32 more when quantizing); bound by the latencies of its loads, which are in flight at once, and of a barrier.

#include "../../cuda/cluster.cuh"

constexpr int VALUES = 8, GROUP = 128, GROUP_THREADS = GROUP / VALUES, MOST_THREADS = 256, MOST_CTAS = 8;

struct Arguments {
  // bf16, eight to an element: what is added, its rows `row_stride` apart, or experts' rows.
  const uint4* x;
  const long long* positions;
  const float* sum_weights;
  uint4* residual;
  const uint4* weight;
  uint4* out;
  // Null where nothing is quantized.
  uint2* values;
  float* scales;
  long long row_stride;
  int width, scale_stride;
  float epsilon;
};

struct Row {
  float value[VALUES];

  __device__ __forceinline__ static Row of(uint4 packed) {
    u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    Row row;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      row.value[2 * i] = __uint_as_float(words[i] << 16);
      row.value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return row;
  }
  __device__ __forceinline__ uint4 packed() const {
    return make_uint4(pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]), pack_bf16(value[4], value[5]),
                      pack_bf16(value[6], value[7]));
  }
  __device__ __forceinline__ void add(const Row& other, float factor) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) value[i] = fmaf(other.value[i], factor, value[i]);
  }
};

// To the same place in another CTA, which counts the bytes at its own barrier.
__device__ __forceinline__ void send(float* place, float value, u64* barrier, u32 rank) {
  asm volatile(
      "{\n .reg .u32 there, counting;\n mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counting, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counting];\n}"
      ::"r"(shared_address(place)), "r"(shared_address(barrier)), "r"(rank), "r"(__float_as_uint(value)) : "memory");
}

// In the order of the program, so that loads are in flight together.
__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 found;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from) : "memory");
  return found;
}

// Sums over a cluster of CTAs, in an order that does not depend on time.
struct ClusterSum {
  float of_warps[MOST_THREADS / 32], of_ctas[MOST_CTAS];
  u64 full;

  __device__ __forceinline__ void prepare() {
    if (threadIdx.x == 0) {
      init_barrier(&full, 1);
      fence_barrier_init();
      arrive_and_expect(&full, cluster_size() * 4);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }

  __device__ __forceinline__ float sum(float value) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32, ranks = cluster_size();
    value = of_warp(value);
    if (lane == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    cluster_wait();
    if (threadIdx.x < 32) {
      value = of_warp(lane < warps ? of_warps[lane] : 0.0f);
      if (lane < ranks) send(&of_ctas[cluster_rank()], value, &full, lane);
    }
    wait(&full, 0);
    float total = 0.0f;
    for (int i = 0; i < ranks; i++) total += of_ctas[i];
    return total;
  }

  __device__ __forceinline__ static float of_warp(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }
};

// What is added to the residual, rounded. CHOICES: of a sum's weighted rows; 0 where there is one row, without a weight.
template <int CHOICES>
__device__ __forceinline__ Row delta(const Arguments& given, long long row, int at) {
  if constexpr (CHOICES == 0) {
    return Row::of(load(given.x + row * (given.row_stride / VALUES) + at));
  } else {
    uint4 found[CHOICES];
    int width = given.width / VALUES;
#pragma unroll
    for (int i = 0; i < CHOICES; i++) found[i] = load(given.x + given.positions[row * CHOICES + i] * width + at);
    Row sum = {};
#pragma unroll
    for (int i = 0; i < CHOICES; i++) sum.add(Row::of(found[i]), given.sum_weights[row * CHOICES + i]);
    return Row::of(sum.packed());
  }
}

__device__ __forceinline__ void quantize(const Arguments& given, const Row& row, long long index, int at) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; i++) largest = fmaxf(largest, fabsf(row.value[i]));
#pragma unroll
  for (int step = GROUP_THREADS / 2; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  float scale = fmaxf(largest, SMALLEST_MAGNITUDE) / LARGEST_E4M3, inverse = 1.0f / scale;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = pack_e4m3(row.value[2 * i] * inverse, row.value[2 * i + 1] * inverse);
  given.values[index * (given.width / VALUES) + at] = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
  if (at % GROUP_THREADS == 0) given.scales[(long long)(at / GROUP_THREADS) * given.scale_stride + index] = scale;
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
  Row sum = delta<CHOICES>(given, row, at);
  sum.add(Row::of(before), 1.0f);
  uint4 rounded = sum.packed();
  *residual = rounded;
  sum = Row::of(rounded);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; i++) square = fmaf(sum.value[i], sum.value[i], square);
  float scale = rsqrtf(cluster.sum(square) / given.width + given.epsilon);
#pragma unroll
  for (int i = 0; i < VALUES; i++) sum.value[i] *= scale;
  Row factors = Row::of(weight);
  // Rounded twice, as the reference does: once normalized, once multiplied.
  sum = Row::of(sum.packed());
#pragma unroll
  for (int i = 0; i < VALUES; i++) sum.value[i] *= factors.value[i];
  rounded = sum.packed();
  given.out[row * (given.width / VALUES) + at] = rounded;
  if (given.values) quantize(given, Row::of(rounded), row, at);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) norm_0(const __grid_constant__ Arguments given) { norm<0>(given); }
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) norm_9(const __grid_constant__ Arguments given) { norm<9>(given); }
