// Block-scaled products of FP8 weights with few rows of activations, for Hopper (sm_90a): the time is that of reading the
// weight, outputs * inputs bytes, and 3 to 5 us more to begin and to end.
//
// Work. A tile is 128 or 192 outputs for all rows: the tensor cores' 64 rows hold outputs, a warpgroup's each, and N holds
// rows of activations. A tile's inputs, in units of 128, are shared by the CTAs of a cluster; in the end each of them adds
// up a share of the tile over the cluster's shared memories, in order of rank. Such reads go at 13 to 20 bytes a cycle, so
// tiles are narrow and their CTAs few: sums of 256 outputs over four CTAs took 2.6 us for 96 rows, of 128 over two 1.0.
//
// One CTA fills a multiprocessor. A thread of a warpgroup of its own copies units of the weight, of the activations and of
// their scales into a ring. No kernel of a step writes weights, so the first units of the weight are copied while the kernel
// before still runs (programmatic dependent launch); only the activations wait for it. The other warpgroups multiply: 128
// outputs of a unit arrive every 0.43 us, and with 96 rows warpgroups of 64 outputs each took 0.52 for them, product, scaling
// and waiting one after another. So two take turns, unit by unit: one scales in float32 while the other multiplies. 192
// outputs leave no registers for turns; they are for weights of more tiles than the chip runs at once.
//
// Activations are not shared by multicast: to be told that a neighbour has room costs more than the copies that it saves
// (16384 to 7168 with 32 rows 36.4 us for 33.3, with 96 rows 40.8 for 39.6).

#include "../../cuda/cluster.cuh"
#include "multiply.cuh"

constexpr int UNIT = 128, GROUP_OUTPUTS = 64, GROUP_THREADS = 128, MOST_UNITS = 80;
// Of a CTA: the rest of the multiprocessor's is for CTAs of the small kernels before and after.
constexpr int SHARED_BYTES = 216000;

struct Arguments {
  TensorMap weight, x;
  const float* x_scales;
  const float* weight_scales;
  unsigned short* out;
  int rows, outputs, units, scale_stride;
};

// GROUPS: of 64 outputs.
template <int ROWS, int GROUPS>
struct Shape {
  static constexpr int TURNS = GROUPS == 2 ? 2 : 1, WARPGROUPS = GROUPS * TURNS;
  // Threads of a turn; those that multiply; all.
  static constexpr int TURN = GROUPS * GROUP_THREADS, CONSUMERS = TURNS * TURN, THREADS = CONSUMERS + GROUP_THREADS;
  // Of a thread that multiplies, and of one that copies, out of what 65,536 registers give to each alike.
  static constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : 160, FEW_REGISTERS = 32;
  static constexpr int OUTPUTS = GROUPS * GROUP_OUTPUTS, WEIGHT_BYTES = OUTPUTS * UNIT, X_BYTES = ROWS * UNIT;
  // Units in flight, each with the scales of its rows and two barriers; to each turn as many, and always the same ones. A
  // turn that came to a stage where the other's unit is still under way would take the phase before for its own.
  static constexpr int UNIT_BYTES = WEIGHT_BYTES + X_BYTES + ROWS * 4 + 16;
  static constexpr int STAGES = (SHARED_BYTES - GROUPS * MOST_UNITS * 4) / UNIT_BYTES / TURNS * TURNS;
  // Of a row of the tile in bf16, 8 outputs apart from a power of two: rows lie in different banks.
  static constexpr int ROW_BYTES = OUTPUTS * 2 + 16;
};

template <int ROWS, int GROUPS>
struct Shared {
  using Of = Shape<ROWS, GROUPS>;
  u8 weight[Of::STAGES][Of::WEIGHT_BYTES];
  u8 x[Of::STAGES][Of::X_BYTES];
  float x_scales[Of::STAGES][ROWS];
  float weight_scales[GROUPS][MOST_UNITS];
  // Of the unit at this stage: all of it has come; its products are done.
  u64 full[Of::STAGES], multiplied[Of::STAGES];
};

// This CTA's units of its tile, and this warp's part in them.
struct Share {
  int first, count, tile, rank, ranks, warpgroup;
};

// Registers that a thread keeps: fewer for good, or more once another warpgroup has given them up.
template <int COUNT>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

__device__ __forceinline__ void copy_run(void* target, const void* source, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ float4 load_peer(u32 address, u32 rank) {
  float4 found;
  asm volatile("{\n .reg .u32 peer;\n mapa.shared::cluster.u32 peer, %4, %5;\n"
               " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [peer];\n}"
               : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(address), "r"(rank) : "memory");
  return found;
}

__device__ __forceinline__ void add(float4& sum, float4 other) {
  sum.x += other.x;
  sum.y += other.y;
  sum.z += other.z;
  sum.w += other.w;
}

template <int ROWS, int GROUPS>
struct Product {
  using Of = Shape<ROWS, GROUPS>;
  Shared<ROWS, GROUPS>& shared;
  const Arguments& given;
  Share own;

  __device__ __forceinline__ int group() const { return own.warpgroup % GROUPS; }
  __device__ __forceinline__ int turn() const { return own.warpgroup / GROUPS; }

  // Of those who multiply.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, %0;" ::"n"(Of::CONSUMERS) : "memory"); }

  // Barriers, the first weights on their way, and at the same time the weight's scales: behind weights that fill all queues
  // they would come 3 us later.
  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == Of::CONSUMERS) {
      for (int i = 0; i < Of::STAGES; i++) {
        init_barrier(&shared.full[i], 1);
        init_barrier(&shared.multiplied[i], Of::TURN / 32);
      }
      fence_async_proxy();
      for (int unit = 0; unit < min(Of::STAGES, own.count); unit++) copy_weight(unit);
      prefetch_map(given.x);
    }
    int last = (given.outputs - 1) / UNIT;
    for (int i = threadIdx.x; i < GROUPS * own.count; i += Of::THREADS) {
      int group = i / own.count, unit = i % own.count;
      int block = min((own.tile * Of::OUTPUTS + group * GROUP_OUTPUTS) / UNIT, last);
      shared.weight_scales[group][unit] = given.weight_scales[block * given.units + own.first + unit];
    }
    __syncthreads();
  }

  __device__ __forceinline__ u32 scale_bytes() const { return min(ROWS, given.scale_stride) * 4; }

  __device__ __forceinline__ void copy_weight(int unit) const {
    int stage = unit % Of::STAGES;
    u64* full = &shared.full[stage];
    arrive_and_expect(full, Of::WEIGHT_BYTES + Of::X_BYTES + scale_bytes());
    copy_box(shared.weight[stage], given.weight, (own.first + unit) * UNIT, own.tile * Of::OUTPUTS, full);
  }

  __device__ __forceinline__ void copy_activations(int unit) const {
    int stage = unit % Of::STAGES, at = own.first + unit;
    u64* full = &shared.full[stage];
    copy_box(shared.x[stage], given.x, at * UNIT, 0, full);
    copy_run(shared.x_scales[stage], given.x_scales + (long long)at * given.scale_stride, scale_bytes(), full);
  }

  // The rest of the ring's first units once the kernel before has ended; then each unit where an earlier one lay.
  __device__ __forceinline__ void produce() const {
    wait_for_earlier();
    for (int unit = 0; unit < min(Of::STAGES, own.count); unit++) copy_activations(unit);
    for (int unit = Of::STAGES; unit < own.count; unit++) {
      wait(&shared.multiplied[unit % Of::STAGES], (unit / Of::STAGES - 1) & 1);
      copy_weight(unit);
      copy_activations(unit);
    }
  }

  // A unit's products, not waited for. Descriptors count in 16 bytes. They stay in uniform registers because `own` is the
  // same for a whole warp; from a thread's own, each product would wait for four moves after the one before.
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

  // Its products, scaled and added.
  __device__ __forceinline__ void finish(int unit, float (&products)[ROWS / 2], float (&total)[ROWS / 2]) const {
    int stage = unit % Of::STAGES;
    pin(products);
    const float2* scales = reinterpret_cast<const float2*>(shared.x_scales[stage]) + threadIdx.x % 4;
    float weight_scale = shared.weight_scales[group()][unit];
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
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

  // The tile's sum over this turn's units: of each thread, element j * 4 + h * 2 + i is row j * 8 + lane % 4 * 2 + i,
  // output warp * 16 + h * 8 + lane / 4.
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

  // This CTA's sums, over its turns, where the ring was; to be read by all of the cluster.
  __device__ __forceinline__ void leave_sums(const float (&total)[ROWS / 2]) const {
    float4* sums = reinterpret_cast<float4*>(&shared) + threadIdx.x % Of::TURN;
    if constexpr (Of::TURNS == 2) {
      if (turn() == 1) {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) sums[j * Of::TURN] = part(total, j);
      }
      meet();
    }
    if (turn() == 0) {
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        float4 sum = part(total, j);
        if constexpr (Of::TURNS == 2) add(sum, sums[j * Of::TURN]);
        sums[j * Of::TURN] = sum;
      }
    }
  }

  // To bf16, where a row's outputs lie next to each other. j: of 8 rows.
  __device__ __forceinline__ void stage_rows(u8* rows, int j, float4 sum) const {
    int lane = threadIdx.x % 32, output = threadIdx.x % Of::TURN / 32 * 16 + lane / 8 % 2 * 8;
    u32 address = shared_address(rows) + (j * 8 + lane % 8) * Of::ROW_BYTES + output * 2;
    store_transposed(address, pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }

  // All CTAs' sums of this one's rows, 8 of every 8 * RANKS, shared by the turns. All are loaded before any is used.
  template <int RANKS>
  __device__ __forceinline__ void add_up(u8* rows) const {
    constexpr int STRIDE = RANKS * Of::TURNS, COUNT = (ROWS / 8 + STRIDE - 1) / STRIDE;
    u32 address = shared_address(reinterpret_cast<float4*>(&shared) + threadIdx.x % Of::TURN);
    int first = own.rank + turn() * RANKS;
    float4 found[COUNT][RANKS];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int j = first + i * STRIDE;
#pragma unroll
      for (int rank = 0; rank < RANKS; rank++)
        if (j < ROWS / 8) found[i][rank] = load_peer(address + j * (Of::TURN * 16), rank);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int j = first + i * STRIDE;
      if (j >= ROWS / 8) break;
#pragma unroll
      for (int rank = 1; rank < RANKS; rank++) add(found[i][0], found[i][rank]);
      stage_rows(rows, j, found[i][0]);
    }
  }

  // This CTA's rows to memory, 16 bytes a thread.
  template <int RANKS>
  __device__ __forceinline__ void write_rows(const u8* rows) const {
    constexpr int PIECES = Of::OUTPUTS / 8, EIGHTS = (ROWS / 8 + RANKS - 1) / RANKS;
#pragma unroll
    for (int piece = threadIdx.x; piece < EIGHTS * 8 * PIECES; piece += Of::CONSUMERS) {
      int at = piece / PIECES, row = (at / 8 * RANKS + own.rank) * 8 + at % 8;
      int output = own.tile * Of::OUTPUTS + piece % PIECES * 8;
      if (row < given.rows && output < given.outputs)
        *reinterpret_cast<uint4*>(given.out + (long long)row * given.outputs + output) =
            *reinterpret_cast<const uint4*>(rows + row * Of::ROW_BYTES + piece % PIECES * 16);
    }
  }

  template <int RANKS>
  __device__ __forceinline__ void store(const float (&total)[ROWS / 2]) const {
    constexpr bool ALONE = RANKS == 1 && Of::TURNS == 1;
    constexpr int SUM_BYTES = Of::TURN * ROWS * 2;
    static_assert(sizeof(shared.weight) + sizeof(shared.x) >= SUM_BYTES + ROWS * Of::ROW_BYTES, "they fit in the ring");
    u8* rows = reinterpret_cast<u8*>(&shared) + SUM_BYTES;
    // All warpgroups have read the last unit.
    meet();
    if constexpr (ALONE) {
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) stage_rows(rows, j, part(total, j));
    } else {
      leave_sums(total);
      cluster_arrive();
      cluster_wait();
      add_up<RANKS>(rows);
      cluster_arrive();
    }
    meet();
    write_rows<RANKS>(rows);
    // Nobody leaves while others read its sums.
    if constexpr (!ALONE) cluster_wait();
  }

  __device__ __forceinline__ void consume() const {
    float total[ROWS / 2] = {};
    multiply_units(total);
    // Whoever stores has read activations, which came after the kernel before; the wait makes its end known to all.
    wait_for_earlier();
    if (own.ranks == 8) store<8>(total);
    else if (own.ranks == 6) store<6>(total);
    else if (own.ranks == 4) store<4>(total);
    else if (own.ranks == 3) store<3>(total);
    else if (own.ranks == 2) store<2>(total);
    else store<1>(total);
  }
};

template <int ROWS, int GROUPS>
__device__ __forceinline__ void run(const Arguments& given) {
  using Of = Shape<ROWS, GROUPS>;
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Shared<ROWS, GROUPS>) <= SHARED_BYTES);
  start_next();
  int rank = cluster_rank(), ranks = cluster_size(), first = rank * given.units / ranks;
  int count = (rank + 1) * given.units / ranks - first;
  Share own{first, count, (int)blockIdx.x / ranks, rank, ranks, __shfl_sync(~0u, (int)threadIdx.x / GROUP_THREADS, 0)};
  Product<ROWS, GROUPS> product{*reinterpret_cast<Shared<ROWS, GROUPS>*>(memory), given, own};
  product.prepare();
  if (threadIdx.x >= Of::CONSUMERS) {
    give_registers<Of::FEW_REGISTERS>();
    if (threadIdx.x == Of::CONSUMERS) product.produce();
  } else {
    take_registers<Of::REGISTERS>();
    product.consume();
  }
}

#define FEW_ROWS(ROWS, GROUPS)                                                  \
  extern "C" __global__ void __launch_bounds__(Shape<ROWS, GROUPS>::THREADS, 1) \
      few_rows_##ROWS##_##GROUPS(const __grid_constant__ Arguments given) {     \
    run<ROWS, GROUPS>(given);                                                   \
  }
FEW_ROWS(16, 2)
FEW_ROWS(32, 2)
FEW_ROWS(64, 2)
FEW_ROWS(96, 2)
FEW_ROWS(16, 3)
FEW_ROWS(32, 3)
FEW_ROWS(64, 3)
FEW_ROWS(96, 3)
