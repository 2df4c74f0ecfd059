// Block-scaled products of FP8 weights with few rows of activations, for Hopper (sm_90a). The time is that of reading the
// weight, outputs * inputs bytes, and with 32 rows 2 to 3 us more to start and to end. "A for B us" means A instead of B.
//
// Work. A tile is up to 192 outputs for all rows. The tensor cores' 64 rows hold the outputs of a warpgroup, N holds rows of
// activations. The CTAs of a cluster share a tile's inputs in units of 128, taking alternate units: the bytes that two CTAs
// read of a row are then contiguous, which memory delivers faster than two streams far apart (16384 to 7168 with 96 rows: 33.3
// for 34.0 us). At the end each CTA adds up a share of the tile, which the others send to its shared memory, in order of rank.
// Writing to another CTA's shared memory runs at 13 to 20 bytes a cycle, so tiles are narrow and their CTAs few: sums of 256
// outputs over four CTAs took 2.6 us for 96 rows, of 128 outputs over two CTAs 1.0.
//
// A CTA fills a multiprocessor. One thread of a warpgroup of its own copies units of the weight, of the activations and of
// their scales into a ring. No kernel of a step writes weights, so the first units of the weight are copied while the previous
// kernel still runs (programmatic dependent launch); only activations wait for it. The other warpgroups multiply. 128 outputs
// of a unit arrive every 0.43 us, and with 96 rows warpgroups of 64 outputs took 0.52 us for them if each one multiplied,
// scaled and waited in turn. So two warpgroups (four for tiles of 64 outputs) take turns unit by unit: one scales in float32
// while others multiply. Tiles of 192 outputs leave no registers for turns; they serve weights of more tiles than the chip runs
// at once. The cache evicts such weights first (1536 to 24576 with 96 rows: 12.8 for 13.8 us). If a cluster shares a row's
// bytes, evicting first made 16384 to 7168 between its neighbours 1 us slower with 32 rows.
//
// Tiles of 112 outputs are for weights that take long: 16384 to 7168 then uses 128 of 132 multiprocessors instead of 112 (30.4
// for 32.0 us with 32 rows), though the tensor cores' last 16 rows hold nothing.
//
// Activations are not multicast: waiting until a neighbour has room costs more than the copies that it saves (16384 to 7168
// with 32 rows 36.4 for 33.3 us, with 96 rows 40.8 for 39.6; with a ring of their own 35.7 for 35.4). `notes.md` has what was
// tried.

#include "../../cuda/cluster.cuh"
#include "../../cuda/copies.cuh"
#include "../../cuda/registers.cuh"
#include "multiply.cuh"

constexpr int UNIT = 128, GROUP_OUTPUTS = 64, GROUP_THREADS = 128, MOST_UNITS = 80;
// Shared memory of a CTA. The rest of the multiprocessor's is left to CTAs of the small kernels before and after.
constexpr int SHARED_BYTES = 216000, MOST_THREADS = 640;

struct Arguments {
  TensorMap weight, x;
  const float* x_scales;
  const float* weight_scales;
  unsigned short* out;
  int rows, outputs, units, scale_stride;
};

// OUTPUTS of a tile are a multiple of 16, in groups of 64, the last of which may be partial.
template <int ROWS, int OUTPUTS>
struct Shape {
  static constexpr int GROUPS = (OUTPUTS + GROUP_OUTPUTS - 1) / GROUP_OUTPUTS, TURNS = GROUPS < 3 ? 4 / GROUPS : 1;
  // Threads of a turn; threads that multiply; all threads.
  static constexpr int TURN = GROUPS * GROUP_THREADS, CONSUMERS = TURNS * TURN, THREADS = CONSUMERS + GROUP_THREADS;
  // Registers of a thread that multiplies and of one that copies. All threads start with 96, as many as 640 of them can have:
  // the rest is left to the small kernels too.
  static constexpr int REGISTERS = 112, FEW_REGISTERS = TURNS > 1 ? 32 : 40;
  static constexpr int WEIGHT_BYTES = OUTPUTS * UNIT, X_BYTES = ROWS * UNIT;
  // Units in flight, each with the scales of its rows and two barriers. Each turn has the same number of stages, always the
  // same ones: at a stage where another turn's unit is still in flight, it would mistake the phase before for its own.
  static constexpr int UNIT_BYTES = WEIGHT_BYTES + X_BYTES + ROWS * 4 + 16;
  static constexpr int STAGES = (SHARED_BYTES - 2 * MOST_UNITS * 4 - 8) / UNIT_BYTES / TURNS * TURNS;
  // Groups of 8 rows; bytes of a row in bf16, padded by 8 outputs so that rows lie in different banks.
  static constexpr int EIGHTS = ROWS / 8, ROW_BYTES = OUTPUTS * 2 + 16;
};

template <int ROWS, int OUTPUTS>
struct Shared {
  using Of = Shape<ROWS, OUTPUTS>;
  u8 weight[Of::STAGES][Of::WEIGHT_BYTES];
  u8 x[Of::STAGES][Of::X_BYTES];
  float x_scales[Of::STAGES][ROWS];
  // Scales of the one or two rows of blocks that the tile lies in.
  float weight_scales[2][MOST_UNITS];
  // For each stage: its unit has arrived; its products are done. Last: all parts that this CTA adds up have arrived.
  u64 full[Of::STAGES], multiplied[Of::STAGES], summed;
};

// The units of its tile that this CTA computes, every `ranks`-th one, and this warp's warpgroup.
struct Share {
  int count, tile, rank, ranks, warpgroup;
};

__device__ __forceinline__ void add(float4& sum, float4 other) {
  sum.x += other.x;
  sum.y += other.y;
  sum.z += other.z;
  sum.w += other.w;
}

template <int ROWS, int OUTPUTS>
struct Product {
  using Of = Shape<ROWS, OUTPUTS>;
  Shared<ROWS, OUTPUTS>& shared;
  const Arguments& given;
  Share own;

  __device__ __forceinline__ int group() const { return own.warpgroup % Of::GROUPS; }
  __device__ __forceinline__ int turn() const { return own.warpgroup / Of::GROUPS; }
  // Index of this CTA's unit among all units of the tile.
  __device__ __forceinline__ int place(int unit) const { return own.rank + unit * own.ranks; }

  // All threads that multiply meet.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, %0;" ::"n"(Of::CONSUMERS) : "memory"); }

  // Initializes barriers and starts copying the first weights. Other threads load the weight's scales meanwhile: behind weights
  // that fill all queues, scales would arrive 3 us later.
  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == Of::CONSUMERS) {
      for (int i = 0; i < Of::STAGES; i++) {
        init_barrier(&shared.full[i], 1);
        init_barrier(&shared.multiplied[i], Of::TURN / 32);
      }
      init_barrier(&shared.summed, 1);
      fence_barrier_init();
      fence_async_proxy();
      for (int unit = 0; unit < min(Of::STAGES, own.count); unit++) copy_weight(unit);
      prefetch_map(given.x);
      int own_eights = (Of::EIGHTS - own.rank + own.ranks - 1) / own.ranks;
      arrive_and_expect(&shared.summed, own.ranks * own_eights * Of::TURN * 16);
    }
    int first = own.tile * OUTPUTS / UNIT, last = (given.outputs - 1) / UNIT;
    for (int i = threadIdx.x; i < 2 * own.count; i += Of::THREADS) {
      int block = min(first + i / own.count, last), unit = i % own.count;
      shared.weight_scales[i / own.count][unit] = given.weight_scales[block * given.units + place(unit)];
    }
    __syncthreads();
  }

  __device__ __forceinline__ u32 scale_bytes() const { return min(ROWS, given.scale_stride) * 4; }

  __device__ __forceinline__ void copy_weight(int unit) const {
    int stage = unit % Of::STAGES;
    u64* full = &shared.full[stage];
    arrive_and_expect(full, Of::WEIGHT_BYTES + Of::X_BYTES + scale_bytes());
    int column = place(unit) * UNIT, row = own.tile * OUTPUTS;
    if constexpr (Of::TURNS == 1) copy_box_once(shared.weight[stage], given.weight, column, row, full);
    else copy_box(shared.weight[stage], given.weight, column, row, full);
  }

  __device__ __forceinline__ void copy_activations(int unit) const {
    int stage = unit % Of::STAGES, at = place(unit);
    u64* full = &shared.full[stage];
    copy_box(shared.x[stage], given.x, at * UNIT, 0, full);
    copy_run(shared.x_scales[stage], given.x_scales + (long long)at * given.scale_stride, scale_bytes(), full);
  }

  // Once the previous kernel has ended, copies the activations of the ring's first units; then each further unit as soon as its
  // stage is free.
  __device__ __forceinline__ void produce() const {
    wait_for_earlier();
    for (int unit = 0; unit < min(Of::STAGES, own.count); unit++) copy_activations(unit);
    for (int unit = Of::STAGES; unit < own.count; unit++) {
      wait(&shared.multiplied[unit % Of::STAGES], (unit / Of::STAGES - 1) & 1);
      copy_weight(unit);
      copy_activations(unit);
    }
  }

  // Issues a unit's products, and does not wait. Descriptors count in 16 bytes. They stay in uniform registers because `own` is
  // the same for a whole warp; from ordinary registers, each product would wait for four moves after the one before.
  __device__ __forceinline__ void begin(int unit, float (&products)[ROWS / 2]) const {
    int stage = unit % Of::STAGES;
    u64 weight = descriptor<1>(shared_address(shared.weight) + group() * (GROUP_OUTPUTS * UNIT));
    u64 x = descriptor<1>(shared_address(shared.x)) + stage * (Of::X_BYTES / 16);
    weight += stage * (Of::WEIGHT_BYTES / 16);
    wait(&shared.full[stage], unit / Of::STAGES & 1);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < UNIT / 32; step++) multiply(products, weight + step * 2, x + step * 2, step > 0);
    wgmma_commit();
  }

  // Whether this warp's 16 outputs lie in the tile's first row of blocks, 0, or its second, 1.
  __device__ __forceinline__ int block() const {
    int first = own.tile * OUTPUTS;
    return min((first + threadIdx.x % Of::TURN / 32 * 16) / UNIT - first / UNIT, 1);
  }

  // Scales a unit's products and adds them to the total.
  __device__ __forceinline__ void finish(int unit, float (&products)[ROWS / 2], float (&total)[ROWS / 2]) const {
    int stage = unit % Of::STAGES;
    pin(products);
    const float2* scales = reinterpret_cast<const float2*>(shared.x_scales[stage]) + threadIdx.x % 4;
    float weight_scale = shared.weight_scales[block()][unit];
#pragma unroll
    for (int j = 0; j < Of::EIGHTS; j++) {
      float2 both = scales[j * 4];
      float first = both.x * weight_scale, second = both.y * weight_scale;
      total[j * 4] = fmaf(products[j * 4], first, total[j * 4]);
      total[j * 4 + 1] = fmaf(products[j * 4 + 1], second, total[j * 4 + 1]);
      total[j * 4 + 2] = fmaf(products[j * 4 + 2], first, total[j * 4 + 2]);
      total[j * 4 + 3] = fmaf(products[j * 4 + 3], second, total[j * 4 + 3]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.multiplied[stage]);
  }

  // Sums the tile over this turn's units. A thread's element j * 4 + h * 2 + i is row j * 8 + lane % 4 * 2 + i and output
  // warp * 16 + h * 8 + lane / 4.
  __device__ __forceinline__ void multiply_units(float (&total)[ROWS / 2]) const {
#pragma unroll 1
    for (int unit = turn(); unit < own.count; unit += Of::TURNS) {
      float products[ROWS / 2];
      begin(unit, products);
      wgmma_wait<0>();
      finish(unit, products, total);
    }
  }

  static __device__ __forceinline__ float4 part(const float (&total)[ROWS / 2], int j) {
    return make_float4(total[j * 4], total[j * 4 + 1], total[j * 4 + 2], total[j * 4 + 3]);
  }

  // Stores 8 rows, the j-th ones, as bf16 in shared memory, where a row's outputs are contiguous.
  __device__ __forceinline__ void stage_rows(u8* rows, int j, float4 sum) const {
    int lane = threadIdx.x % 32, output = threadIdx.x % Of::TURN / 32 * 16 + lane / 8 % 2 * 8;
    if (OUTPUTS % GROUP_OUTPUTS && output >= OUTPUTS) return;
    u32 address = shared_address(rows) + (j * 8 + lane % 8) * Of::ROW_BYTES + output * 2;
    store_transposed(address, pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }

  // Partial sums lie where the ring was. `turns` has those of all turns but the first. `ranks` has those that arrive from all
  // CTAs, this one included, for this CTA's 8 of each 8 * RANKS rows.
  template <int RANKS>
  struct Sums {
    static constexpr int LARGEST = (Of::EIGHTS + RANKS - 1) / RANKS;
    float4 turns[Of::TURNS - 1][Of::EIGHTS][Of::TURN];
    float4 ranks[RANKS][LARGEST][Of::TURN];
    u8 rows[ROWS * Of::ROW_BYTES];
  };

  // Adds this CTA's sums over its turns, and sends them to the CTAs that add up the ranks.
  template <int RANKS>
  __device__ __forceinline__ void send_sums(const float (&total)[ROWS / 2], Sums<RANKS>& sums) const {
    int thread = threadIdx.x % Of::TURN;
    if (turn() > 0) {
#pragma unroll
      for (int j = 0; j < Of::EIGHTS; j++) sums.turns[turn() - 1][j][thread] = part(total, j);
    }
    meet();
    // Wait until the rings of all CTAs are free.
    cluster_wait();
    if (turn() > 0) return;
#pragma unroll
    for (int j = 0; j < Of::EIGHTS; j++) {
      float4 sum = part(total, j);
#pragma unroll
      for (int other = 0; other < Of::TURNS - 1; other++) add(sum, sums.turns[other][j][thread]);
      send(&sums.ranks[own.rank][j / RANKS][thread], sum, &shared.summed, j % RANKS);
    }
  }

  // Adds up this CTA's rows, which its turns share.
  template <int RANKS>
  __device__ __forceinline__ void add_up(Sums<RANKS>& sums) const {
#pragma unroll
    for (int i = 0; i < (Sums<RANKS>::LARGEST + Of::TURNS - 1) / Of::TURNS; i++) {
      int at = turn() + i * Of::TURNS, j = at * RANKS + own.rank;
      if (j >= Of::EIGHTS) break;
      float4 sum = sums.ranks[0][at][threadIdx.x % Of::TURN];
#pragma unroll
      for (int rank = 1; rank < RANKS; rank++) add(sum, sums.ranks[rank][at][threadIdx.x % Of::TURN]);
      stage_rows(sums.rows, j, sum);
    }
  }

  // Writes this CTA's rows to memory, 16 bytes a thread.
  template <int RANKS>
  __device__ __forceinline__ void write_rows(const u8* rows) const {
    constexpr int PIECES = OUTPUTS / 8, EIGHTS = (Of::EIGHTS + RANKS - 1) / RANKS;
#pragma unroll
    for (int piece = threadIdx.x; piece < EIGHTS * 8 * PIECES; piece += Of::CONSUMERS) {
      int at = piece / PIECES, row = (at / 8 * RANKS + own.rank) * 8 + at % 8;
      int output = own.tile * OUTPUTS + piece % PIECES * 8;
      if (row < given.rows && output < given.outputs)
        *reinterpret_cast<uint4*>(given.out + (long long)row * given.outputs + output) =
            *reinterpret_cast<const uint4*>(rows + row * Of::ROW_BYTES + piece % PIECES * 16);
    }
  }

  // Sums over turns and cluster, and stores. The cluster barriers do not make writes visible, which would wait for all of
  // memory (0.3 us for both): the first only says that rings are free, and the receiver's barrier counts what is sent.
  template <int RANKS>
  __device__ __forceinline__ void store(const float (&total)[ROWS / 2]) const {
    static_assert(sizeof(shared.weight) + sizeof(shared.x) >= sizeof(Sums<RANKS>), "they fit in the ring");
    Sums<RANKS>& sums = reinterpret_cast<Sums<RANKS>&>(shared);
    // Wait until all warpgroups have read the last unit.
    meet();
    cluster_arrive_relaxed();
    send_sums<RANKS>(total, sums);
    wait(&shared.summed, 0);
    cluster_arrive_relaxed();
    add_up<RANKS>(sums);
    meet();
    write_rows<RANKS>(sums.rows);
    // A CTA must not exit while its partial sums are still on their way to another CTA.
    cluster_wait();
  }

  // Likewise, of a CTA without a cluster.
  struct TurnSums {
    // The first turn's are not used.
    float4 turns[Of::TURNS][Of::EIGHTS][Of::TURN];
    u8 rows[ROWS * Of::ROW_BYTES];
  };

  // Sums over turns, and stores.
  __device__ __forceinline__ void store_alone(const float (&total)[ROWS / 2]) const {
    static_assert(sizeof(shared.weight) + sizeof(shared.x) >= sizeof(TurnSums), "they fit in the ring");
    TurnSums& sums = reinterpret_cast<TurnSums&>(shared);
    meet();
    if (Of::TURNS > 1) {
      if (turn() > 0) {
#pragma unroll
        for (int j = 0; j < Of::EIGHTS; j++) sums.turns[turn()][j][threadIdx.x % Of::TURN] = part(total, j);
      }
      meet();
    }
    if (turn() == 0) {
#pragma unroll
      for (int j = 0; j < Of::EIGHTS; j++) {
        float4 sum = part(total, j);
#pragma unroll
        for (int other = 1; other < Of::TURNS; other++) add(sum, sums.turns[other][j][threadIdx.x % Of::TURN]);
        stage_rows(sums.rows, j, sum);
      }
    }
    meet();
    write_rows<1>(sums.rows);
  }

  __device__ __forceinline__ void consume() const {
    float total[ROWS / 2] = {};
    // Activations arrive after the previous kernel's end anyway. The wait tells all storing threads that it has ended.
    wait_for_earlier();
    multiply_units(total);
    // A CTA without a cluster cannot send to itself, and tilings without turns have none.
    if constexpr (Of::TURNS == 1) store_alone(total);
    else if (own.ranks == 1) store_alone(total);
    else if (own.ranks == 4) store<4>(total);
    else if (own.ranks == 3) store<3>(total);
    else store<2>(total);
  }
};

template <int ROWS, int OUTPUTS>
__device__ __forceinline__ void run(const Arguments& given) {
  using Of = Shape<ROWS, OUTPUTS>;
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Shared<ROWS, OUTPUTS>) <= SHARED_BYTES);
  start_next();
  int rank = cluster_rank(), ranks = cluster_size(), count = (given.units - rank + ranks - 1) / ranks;
  Share own{count, (int)blockIdx.x / ranks, rank, ranks, __shfl_sync(~0u, (int)threadIdx.x / GROUP_THREADS, 0)};
  Product<ROWS, OUTPUTS> product{*reinterpret_cast<Shared<ROWS, OUTPUTS>*>(memory), given, own};
  product.prepare();
  if (threadIdx.x >= Of::CONSUMERS) {
    give_registers<Of::FEW_REGISTERS>();
    if (threadIdx.x == Of::CONSUMERS) product.produce();
  } else {
    take_registers<Of::REGISTERS>();
    product.consume();
  }
}

#define FEW_ROWS(ROWS, OUTPUTS)                                                        \
  extern "C" __device__ int few_rows_##ROWS##_##OUTPUTS##_shared_bytes = SHARED_BYTES; \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)                         \
      few_rows_##ROWS##_##OUTPUTS(const __grid_constant__ Arguments given) {           \
    run<ROWS, OUTPUTS>(given);                                                         \
  }
#define FEW_ROWS_OF(OUTPUTS) FEW_ROWS(16, OUTPUTS) FEW_ROWS(32, OUTPUTS) FEW_ROWS(64, OUTPUTS) FEW_ROWS(96, OUTPUTS)
FEW_ROWS_OF(64)
FEW_ROWS_OF(112)
FEW_ROWS_OF(128)
FEW_ROWS_OF(192)
