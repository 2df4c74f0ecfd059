// A linear layer for few tokens, such as those of attention, for Hopper (sm_90a): bf16 products, summed in float32. Its time is
// that of bringing tokens to the multiprocessors, and of starting and ending, where weights arrive before: they are copied to
// shared memory while the previous kernel still runs (programmatic dependent launch).
//
// A tile is 64 or 128 outputs by all tokens. The tensor cores' 64 rows hold the outputs of a warpgroup, N holds tokens. The CTAs of
// a cluster share a tile's inputs in units of 64, taking alternate ones. At the end each CTA adds up a share of the tile, which
// the others send to its shared memory.
#include "../../cuda/cluster.cuh"
#include "../../cuda/bf16_products.cuh"

constexpr int GROUP_OUTPUTS = 64, GROUP_THREADS = 128;
// A unit is 128 bytes (64 elements) of as many rows as there are outputs or tokens, swizzled.
constexpr int ELEMENTS = 64, LINE = 128;
// The most shared memory of a CTA, and its most stages. What is left of the multiprocessor's is for CTAs of the kernels before and
// after, which copy their weights meanwhile. So a launch asks for no more than its units need.
constexpr int SHARED_BYTES = 216000, MOST_CTAS = 8, MOST_STAGES = 12;
// Shared memory but for stages and pieces.
constexpr int OTHER_BYTES = 3072;

struct Arguments {
  TensorMap weight, x;
  unsigned short* out;
  // stages: of shared memory, up to MOST_STAGES.
  int rows, outputs, units, stages;
};

// Sums of 8 tokens and 16 outputs, which a warp holds: a thread has 4.
struct Piece {
  float4 of_lane[32];
};

template <int ROWS, int OUTPUTS>
struct Shape {
  static constexpr int CONSUMERS = OUTPUTS / GROUP_OUTPUTS * GROUP_THREADS, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 32;
  static constexpr int WEIGHT_BYTES = OUTPUTS * LINE, X_BYTES = ROWS * LINE;
  // Pieces of a tile, of which a cluster's CTAs have as many each, but for one.
  static constexpr int PIECES = ROWS / 8 * WARPS, ROOM = PIECES + MOST_CTAS - 1;
};

// What follows the stages in shared memory.
template <int ROWS, int OUTPUTS>
struct Shared {
  using Of = Shape<ROWS, OUTPUTS>;
  // What all CTAs of the cluster have sent, this one included, by the CTA that sent it.
  Piece sent[Of::ROOM];
  // Each warp's outputs of 8 tokens, a token's after another's.
  alignas(16) unsigned short lines[Of::WARPS][8][16];
  // For each stage: its unit has arrived; its products are done. Last: all pieces that this CTA adds up have arrived.
  u64 full[MOST_STAGES], multiplied[MOST_STAGES], summed;
};

template <int ROWS, int OUTPUTS>
struct Product {
  using Of = Shape<ROWS, OUTPUTS>;
  Shared<ROWS, OUTPUTS>& shared;
  // Stages: their weights, then their tokens.
  u8* memory;
  const Arguments& given;
  // This CTA's tile, its rank in the cluster, and its units: every `ranks`-th one of the tile's; this warp's number.
  int tile, rank, ranks, count, warp;

  __device__ __forceinline__ u8* weight(int stage) const { return memory + stage * Of::WEIGHT_BYTES; }
  __device__ __forceinline__ u8* x(int stage) const { return weight(given.stages) + stage * Of::X_BYTES; }

  // Pieces of 8 tokens that there are; those that the cluster's CTA `of` adds up: every `ranks`-th one.
  __device__ __forceinline__ int pieces() const { return (given.rows + 7) / 8 * Of::WARPS; }
  __device__ __forceinline__ int pieces_of(int of) const { return (pieces() - of + ranks - 1) / ranks; }

  // Initializes barriers and starts copying the first weights: the role of one thread.
  __device__ __forceinline__ void prepare() const {
    for (int i = 0; i < given.stages; i++) {
      init_barrier(&shared.full[i], 1);
      init_barrier(&shared.multiplied[i], Of::WARPS);
    }
    init_barrier(&shared.summed, 1);
    fence_barrier_init();
    fence_async_proxy();
    for (int unit = 0; unit < min(given.stages, count); unit++) copy_weight(unit);
    prefetch_map(given.x);
    if (ranks > 1) arrive_and_expect(&shared.summed, ranks * pieces_of(rank) * (int)sizeof(Piece));
  }

  // The first byte of a unit in its rows.
  __device__ __forceinline__ int column(int unit) const { return (rank + unit * ranks) * LINE; }

  __device__ __forceinline__ void copy_weight(int unit) const {
    u64* full = &shared.full[unit % given.stages];
    arrive_and_expect(full, Of::WEIGHT_BYTES + Of::X_BYTES);
    copy_box(weight(unit % given.stages), given.weight, column(unit), tile * OUTPUTS, full);
  }

  __device__ __forceinline__ void copy_x(int unit) const {
    copy_box(x(unit % given.stages), given.x, column(unit), 0, &shared.full[unit % given.stages]);
  }

  // Copies tokens for the units whose weights are under way, then all that is left of both as stages become free.
  __device__ __forceinline__ void copy_units() const {
    for (int unit = 0; unit < min(given.stages, count); unit++) copy_x(unit);
    for (int unit = given.stages; unit < count; unit++) {
      wait(&shared.multiplied[unit % given.stages], (unit / given.stages - 1) & 1);
      copy_weight(unit);
      copy_x(unit);
    }
  }

  // Multiplies this warpgroup's outputs over all units of the CTA. Products of two units are under way at once.
  __device__ __forceinline__ void multiply(float (&sum)[ROWS / 2]) const {
    u64 left = descriptor<1>(shared_address(memory) + warp / 4 * (GROUP_OUTPUTS * LINE));
    u64 right = descriptor<1>(shared_address(x(0)));
#pragma unroll 1
    for (int unit = 0; unit < count; unit++) {
      int stage = unit % given.stages;
      wait(&shared.full[stage], unit / given.stages & 1);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < ELEMENTS / 16; step++)
        multiply_step(sum, left + stage * (Of::WEIGHT_BYTES / 16) + step * 2, right + stage * (Of::X_BYTES / 16) + step * 2, 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (unit > 0 && threadIdx.x % 32 == 0) arrive(&shared.multiplied[(unit - 1) % given.stages]);
    }
    wgmma_wait<0>();
    pin(sum);
  }

  static __device__ __forceinline__ float4 piece(const float (&sum)[ROWS / 2], int j) {
    return make_float4(sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]);
  }

  // Sends each piece to the CTA that adds it up. Piece j * WARPS + w has the j-th 8 tokens and the outputs of warp w.
  __device__ __forceinline__ void send_pieces(const float (&sum)[ROWS / 2]) const {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      int at = j * Of::WARPS + warp, to = at % ranks;
      if (at < pieces())
        send(&shared.sent[rank * pieces_of(to) + at / ranks].of_lane[threadIdx.x % 32], piece(sum, j), &shared.summed, to);
    }
  }

  // Adds up this CTA's pieces, in order of rank, and stores them.
  __device__ __forceinline__ void store_sums() const {
    int own = pieces_of(rank);
    for (int i = warp; i < own; i += Of::WARPS) {
      float4 total = shared.sent[i].of_lane[threadIdx.x % 32];
      for (int from = 1; from < ranks; from++) {
        float4 other = shared.sent[from * own + i].of_lane[threadIdx.x % 32];
        total = make_float4(total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w);
      }
      int at = i * ranks + rank;
      store(total, at / Of::WARPS, at % Of::WARPS);
    }
  }

  // Stores the j-th 8 tokens of 16 outputs, a whole sector of each token.
  __device__ __forceinline__ void store(float4 sum, int j, int of_warp) const {
    int lane = threadIdx.x % 32;
    auto& lines = shared.lines[warp];
    store_transposed(shared_address(&lines[lane % 8][lane / 8 % 2 * 8]), pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    __syncwarp();
    int row = j * 8 + lane / 4, output = tile * OUTPUTS + of_warp * 16 + lane % 4 * 4;
    if (row < given.rows && output < given.outputs)
      *reinterpret_cast<uint2*>(given.out + (long long)row * given.outputs + output) =
          *reinterpret_cast<const uint2*>(&lines[lane / 4][lane % 4 * 4]);
    __syncwarp();
  }
};

template <int ROWS, int OUTPUTS>
__device__ __forceinline__ void multiply_tile(const Arguments& given) {
  using Of = Shape<ROWS, OUTPUTS>;
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Shared<ROWS, OUTPUTS>) <= Of::ROOM * sizeof(Piece) + OTHER_BYTES);
  start_next();
  int rank = cluster_rank(), ranks = cluster_size();
  u8* others = memory + given.stages * (Of::WEIGHT_BYTES + Of::X_BYTES);
  Product<ROWS, OUTPUTS> work{*reinterpret_cast<Shared<ROWS, OUTPUTS>*>(others), memory, given, (int)blockIdx.x / ranks, rank, ranks,
                              (given.units - rank + ranks - 1) / ranks, __shfl_sync(~0u, (int)threadIdx.x / 32, 0)};
  if (threadIdx.x == Of::CONSUMERS) work.prepare();
  __syncthreads();
  // Peers' barriers are ready once all have arrived.
  cluster_arrive_relaxed();
  wait_for_earlier();
  if (work.warp == Of::WARPS) {
    if (threadIdx.x == Of::CONSUMERS) work.copy_units();
    __syncwarp();
    cluster_wait();
    cluster_arrive_relaxed();
    cluster_wait();
    return;
  }
  float sum[ROWS / 2] = {};
  work.multiply(sum);
  cluster_wait();
  if (ranks == 1) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) work.store(work.piece(sum, j), j, work.warp);
    cluster_arrive_relaxed();
  } else {
    work.send_pieces(sum);
    wait(&work.shared.summed, 0);
    cluster_arrive_relaxed();
    work.store_sums();
  }
  // A CTA must not exit while its pieces are still on their way to another.
  cluster_wait();
}

#define CLUSTERS(ROWS, OUTPUTS)                                                                     \
  extern "C" __device__ int clusters_##ROWS##_##OUTPUTS##_shared_bytes = SHARED_BYTES;              \
  extern "C" __global__ void __launch_bounds__(Shape<ROWS, OUTPUTS>::THREADS, 1)                    \
      clusters_##ROWS##_##OUTPUTS(const __grid_constant__ Arguments given) {                        \
    multiply_tile<ROWS, OUTPUTS>(given);                                                            \
  }
CLUSTERS(16, 64)
CLUSTERS(32, 64)
CLUSTERS(64, 64)
CLUSTERS(16, 128)
CLUSTERS(32, 128)
CLUSTERS(64, 128)
