// Residual addition, norm and quantization of few rows of a group of ranks, with the exchange before it, after it, or both, for
// Hopper (sm_90a). As in norm/cuda/clusters.cu a cluster of CTAs does a row: each rank its own rows, or all of them.
//
// Before the norm a rank may receive the other ranks' parts of its rows and add them up; after the norm, it may send its normalized
// rows to all. Either takes a hop over NVLink, which is most of the time. Rows travel in bfloat16, and whoever receives them
// quantizes them.

#include "../../cuda/cluster_norm.cuh"
#include "../../cuda/expert_sum.cuh"
#include "sums.cuh"

constexpr int NORM_THREADS = 256;
// Which rows of the sum of all ranks' parts a rank makes: none, since what it adds is no part of one, its own, or all.
enum Sums { NONE, OWN, ALL };

struct NormArguments {
  Members members;
  // bf16, eight values an element: [rows, width], or [ranks * rows, width] parts of a sum of which each rank gets its own.
  const uint4* delta;
  // Experts' outputs that are first added up, to this rank's part of [rows, width].
  ExpertSum experts;
  // [rows, width]
  uint4* residual;
  const uint4* weight;
  // [all rows, width], which may be fewer than ranks * rows, or [rows, width]; null if only FP8 is wanted.
  uint4* plain;
  // Null if nothing is quantized.
  uint2* values;
  float* scales;
  int rows, all_rows, width, scale_stride;
  float epsilon;
};

// Called by all threads of a CTA with the same row.
__device__ __forceinline__ void store_row(const NormArguments& given, uint4 packed, int row, int at) {
  if (row >= given.all_rows) return;
  if (given.plain) given.plain[row * (given.width / VALUES) + at] = packed;
  if (!given.values) return;
  Values values = Values::of(packed);
  float scale = scale_of(values);
  given.values[row * (given.width / VALUES) + at] = quantize(values, scale);
  if (at % GROUP_THREADS == 0) given.scales[at / GROUP_THREADS * given.scale_stride + row] = scale;
}

// CHOICES: experts of a token, if their outputs are to be added up; else 0.
template <Sums SUMS, bool GATHERS, int CHOICES, int MOST>
__device__ __forceinline__ void norm(const NormArguments& given) {
  __shared__ ClusterSum cluster;
  const Members& members = given.members;
  start_next();
  cluster.prepare();
  int row = blockIdx.x / cluster_size(), at = cluster_rank() * blockDim.x + threadIdx.x, width = given.width / VALUES;
  uint4 weight = load(given.weight + at), found[MOST - 1];
  wait_for_earlier();
  u32 before = *turns(members);
  uint4* residual = given.residual + row * width + at;
  uint4 had = load(residual), delta;
  if constexpr (CHOICES == 0) {
    delta = load(given.delta + ((SUMS == OWN ? members.own * given.rows : 0) + row) * width + at);
  } else {
    delta = add_up<CHOICES>(given.experts, row, width, at);
  }
  if (SUMS != NONE) {
    for (int i = 1; i < members.ranks; i++) {
      int receiver = (members.own + i) % members.ranks;
      uint4 theirs = SUMS == ALL ? delta : load(given.delta + (receiver * given.rows + row) * width + at);
      send_words(members, receiver, before + 1, threadIdx.x, theirs);
    }
    receive_words(members, before + 1, threadIdx.x, found);
    delta = sum_in_order<Bf16>(members, delta, found);
  }
  uint4 normalized = add_and_normalize(cluster, Values::of(delta), had, residual, weight, given.width, given.epsilon);
  if (GATHERS) {
    u32 turn = before + (SUMS != NONE ? 2 : 1);
    for (int i = 1; i < members.ranks; i++) send_words(members, (members.own + i) % members.ranks, turn, threadIdx.x, normalized);
    store_row(given, normalized, members.own * given.rows + row, at);
    receive_words(members, turn, threadIdx.x, found);
#pragma unroll
    for (int i = 0; i < MOST - 1; i++) {
      if (i < members.ranks - 1) store_row(given, found[i], other(members, i) * given.rows + row, at);
    }
  } else {
    store_row(given, normalized, row, at);
  }
  count_turns(members, before, (SUMS != NONE ? 1 : 0) + (GATHERS ? 1 : 0));
}

#define NORM(NAME, SUMS, GATHERS, CHOICES, MOST)                                                                          \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS) NAME##_##MOST(const __grid_constant__ NormArguments given) { \
    norm<SUMS, GATHERS, CHOICES, MOST>(given);                                                                            \
  }
#define NORMS(MOST)                           \
  NORM(sum_norm, OWN, false, 0, MOST)         \
  NORM(all_sum_norm, ALL, false, 0, MOST)     \
  NORM(all_experts_norm, ALL, false, 8, MOST) \
  NORM(norm_gather, NONE, true, 0, MOST)      \
  NORM(sum_norm_gather, OWN, true, 0, MOST)
NORMS(2)
NORMS(4)
NORMS(8)
