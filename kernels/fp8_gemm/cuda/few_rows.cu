// Block-scaled products of FP8 weights with few rows of activations, for Hopper (sm_90a): the time is that of reading the
// weight, outputs * inputs bytes.
//
// Work. A tile is 256 or 192 outputs for all rows: the tensor cores' 64 rows hold outputs, a warpgroup's each, and N holds
// rows of activations. A tile's inputs, in units of 128, are shared by the CTAs of a cluster; in the end each of them adds
// up a share of the tile over the cluster's shared memories, in order of rank. One CTA fills a multiprocessor: narrow tiles
// would read the activations from the second-level cache as often as makes that the limit.
//
// One CTA: a thread copies units of the weight and of the activations with their scales, each into a ring of its own. No
// kernel of a step writes weights, so the first units of the weight are copied while the kernel before still runs
// (programmatic dependent launch); only the activations wait for it. A unit's products are scaled and added up in float32.

#include "multiply.cuh"

constexpr int UNIT = 128, GROUP_OUTPUTS = 64, MOST_UNITS = 64;

struct Arguments {
  TensorMap weight, x;
  const float* x_scales;
  const float* weight_scales;
  unsigned short* out;
  int rows, outputs, units, scale_stride;
};

// GROUPS: warpgroups, 64 outputs each.
template <int ROWS, int GROUPS>
struct Shape {
  static constexpr int THREADS = GROUPS * 128, OUTPUTS = GROUPS * GROUP_OUTPUTS, WEIGHT_BYTES = OUTPUTS * UNIT;
  // Units in flight.
  static constexpr int WEIGHTS = GROUPS == 3 ? 7 : ROWS <= 32 ? 6 : 5, ACTIVATIONS = ROWS <= 64 ? 6 : 4;
  // Of a row of the tile in bf16, 8 outputs apart from a power of two: rows lie in different banks.
  static constexpr int ROW_BYTES = OUTPUTS * 2 + 16;
  // Units multiplied at once.
  static constexpr int UNITS = ROWS <= 32 ? 2 : 1;
};

template <int ROWS, int GROUPS>
struct Shared {
  using Of = Shape<ROWS, GROUPS>;
  u8 weight[Of::WEIGHTS][Of::WEIGHT_BYTES];
  u8 x[Of::ACTIVATIONS][ROWS * UNIT];
  float x_scales[Of::ACTIVATIONS][ROWS];
  float weight_scales[GROUPS][MOST_UNITS];
  u64 weight_full[Of::WEIGHTS], x_full[Of::ACTIVATIONS];
  // Of the unit whose weight lies at this stage: products done.
  u64 multiplied[Of::WEIGHTS];
};

// This CTA's units of its tile.
struct Share {
  int first, count, tile, rank, ranks;
};

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

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

// Two fragments of 8 outputs by 8 rows, as 8 rows each of 8 outputs.
__device__ __forceinline__ void store_transposed(u32 address, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(address), "r"(first), "r"(second) : "memory");
}

template <int ROWS, int GROUPS>
struct Product {
  using Of = Shape<ROWS, GROUPS>;
  Shared<ROWS, GROUPS>& shared;
  const Arguments& given;
  Share own;

  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Of::WEIGHTS; i++) {
        init_barrier(&shared.weight_full[i], 1);
        init_barrier(&shared.multiplied[i], Of::THREADS / 32);
      }
      for (int i = 0; i < Of::ACTIVATIONS; i++) init_barrier(&shared.x_full[i], 1);
      fence_async_proxy();
      prefetch_map(given.weight);
      prefetch_map(given.x);
    }
    int group = threadIdx.x / 128, last = (given.outputs - 1) / UNIT;
    int block = min((own.tile * Of::OUTPUTS + group * GROUP_OUTPUTS) / UNIT, last);
    const float* scales = given.weight_scales + block * given.units + own.first;
    for (int unit = threadIdx.x % 128; unit < own.count; unit += 128) shared.weight_scales[group][unit] = scales[unit];
    __syncthreads();
  }

  __device__ __forceinline__ void copy_weight(int unit) const {
    int stage = unit % Of::WEIGHTS;
    u64* full = &shared.weight_full[stage];
    arrive_and_expect(full, Of::WEIGHT_BYTES);
    copy_box(shared.weight[stage], given.weight, (own.first + unit) * UNIT, own.tile * Of::OUTPUTS, full);
  }

  __device__ __forceinline__ void copy_activations(int unit) const {
    int stage = unit % Of::ACTIVATIONS, at = own.first + unit;
    u32 scale_bytes = min(ROWS, given.scale_stride) * 4;
    u64* full = &shared.x_full[stage];
    arrive_and_expect(full, ROWS * UNIT + scale_bytes);
    copy_box(shared.x[stage], given.x, at * UNIT, 0, full);
    copy_run(shared.x_scales[stage], given.x_scales + (long long)at * given.scale_stride, scale_bytes, full);
  }

  // What the rings hold at first; of activations once the kernel before has ended.
  __device__ __forceinline__ void fill() const {
    for (int unit = 0; unit < min(Of::WEIGHTS, own.count); unit++) copy_weight(unit);
    wait_for_earlier();
    for (int unit = 0; unit < min(Of::ACTIVATIONS, own.count); unit++) copy_activations(unit);
  }

  // What comes where the units just before this one lay: all warps have multiplied these, or soon will.
  __device__ __forceinline__ void refill(int unit) const {
#pragma unroll
    for (int done = unit - Of::UNITS; done < unit; done++) {
      if (done < 0 || done + min(Of::WEIGHTS, Of::ACTIVATIONS) >= own.count) continue;
      wait(&shared.multiplied[done % Of::WEIGHTS], done / Of::WEIGHTS & 1);
      if (done + Of::ACTIVATIONS < own.count) copy_activations(done + Of::ACTIVATIONS);
      if (done + Of::WEIGHTS < own.count) copy_weight(done + Of::WEIGHTS);
    }
  }

  // A unit's products, not waited for.
  __device__ __forceinline__ void begin(int unit, float (&products)[ROWS / 2]) const {
    int weight_stage = unit % Of::WEIGHTS, x_stage = unit % Of::ACTIVATIONS;
    u32 weight = shared_address(shared.weight[weight_stage]) + threadIdx.x / 128 * (GROUP_OUTPUTS * UNIT);
    u32 x = shared_address(shared.x[x_stage]);
    wait(&shared.weight_full[weight_stage], unit / Of::WEIGHTS & 1);
    wait(&shared.x_full[x_stage], unit / Of::ACTIVATIONS & 1);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < UNIT / 32; step++)
      multiply(products, descriptor<1>(weight + step * 32), descriptor<1>(x + step * 32), step > 0);
    wgmma_commit();
  }

  // Its products, scaled and added.
  __device__ __forceinline__ void finish(int unit, float (&products)[ROWS / 2], float (&total)[ROWS / 2]) const {
    pin(products);
    const float2* scales = reinterpret_cast<const float2*>(shared.x_scales[unit % Of::ACTIVATIONS]) + threadIdx.x % 4;
    float weight_scale = shared.weight_scales[threadIdx.x / 128][unit];
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
    if (threadIdx.x % 32 == 0) arrive(&shared.multiplied[unit % Of::WEIGHTS]);
  }

  // The tile's sum over this CTA's units: of each thread, element j * 4 + h * 2 + i is row j * 8 + lane % 4 * 2 + i,
  // output warp * 16 + h * 8 + lane / 4.
  __device__ __forceinline__ void multiply_units(float (&total)[ROWS / 2]) const {
    int unit = 0;
#pragma unroll 1
    for (; unit + Of::UNITS <= own.count; unit += Of::UNITS) {
      if (threadIdx.x == 0) refill(unit);
      __syncwarp();
      float products[Of::UNITS][ROWS / 2];
#pragma unroll
      for (int i = 0; i < Of::UNITS; i++) begin(unit + i, products[i]);
      wgmma_wait<Of::UNITS - 1>();
      finish(unit, products[0], total);
      if constexpr (Of::UNITS == 2) {
        wgmma_wait<0>();
        finish(unit + 1, products[1], total);
      }
    }
    if (unit == own.count) return;
    float products[ROWS / 2];
    begin(unit, products);
    wgmma_wait<0>();
    finish(unit, products, total);
  }

  // All CTAs' sums of this thread's elements of rows j * 8 and on.
  template <int RANKS>
  __device__ __forceinline__ float4 add_up(int j) const {
    u32 address = shared_address(reinterpret_cast<float4*>(shared.weight) + j * Of::THREADS + threadIdx.x);
    float4 found[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++) found[rank] = load_peer(address, rank);
#pragma unroll
    for (int rank = 1; rank < RANKS; rank++) {
      found[0].x += found[rank].x;
      found[0].y += found[rank].y;
      found[0].z += found[rank].z;
      found[0].w += found[rank].w;
    }
    return found[0];
  }

  // To bf16, where a row's outputs lie next to each other.
  __device__ __forceinline__ void stage(u8* rows, int j, float4 sum) const {
    int lane = threadIdx.x % 32, output = threadIdx.x / 32 * 16 + lane / 8 % 2 * 8;
    u32 address = shared_address(rows) + (j * 8 + lane % 8) * Of::ROW_BYTES + output * 2;
    store_transposed(address, pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }

  template <int RANKS>
  __device__ __forceinline__ void store(const float (&total)[ROWS / 2]) const {
    constexpr int SUM_BYTES = RANKS > 1 ? Of::THREADS * ROWS * 2 : 0, PIECES = Of::OUTPUTS / 8;
    static_assert(sizeof(shared.weight) >= SUM_BYTES + ROWS * Of::ROW_BYTES, "sums and rows fit where the weight was");
    float4* sums = reinterpret_cast<float4*>(shared.weight);
    u8* rows = reinterpret_cast<u8*>(&shared.weight) + SUM_BYTES;
    // All warpgroups have read the last unit.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      float4 own_sum = make_float4(total[j * 4], total[j * 4 + 1], total[j * 4 + 2], total[j * 4 + 3]);
      if (RANKS > 1) sums[j * Of::THREADS + threadIdx.x] = own_sum;
      else stage(rows, j, own_sum);
    }
    if constexpr (RANKS > 1) {
      cluster_arrive();
      cluster_wait();
#pragma unroll 1
      for (int j = own.rank; j < ROWS / 8; j += RANKS) stage(rows, j, add_up<RANKS>(j));
      cluster_arrive();
    }
    __syncthreads();
#pragma unroll
    for (int piece = threadIdx.x; piece < ROWS * PIECES; piece += Of::THREADS) {
      int row = piece / PIECES, output = own.tile * Of::OUTPUTS + piece % PIECES * 8;
      if (row / 8 % RANKS == own.rank && row < given.rows && output < given.outputs)
        *reinterpret_cast<uint4*>(given.out + (long long)row * given.outputs + output) =
            *reinterpret_cast<const uint4*>(rows + row * Of::ROW_BYTES + piece % PIECES * 16);
    }
    // Nobody leaves while others read its sums.
    if constexpr (RANKS > 1) cluster_wait();
  }
};

template <int ROWS, int GROUPS>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  start_next();
  int rank = cluster_rank(), ranks = cluster_size(), first = rank * given.units / ranks;
  Share own{first, (rank + 1) * given.units / ranks - first, (int)blockIdx.x / ranks, rank, ranks};
  Product<ROWS, GROUPS> product{*reinterpret_cast<Shared<ROWS, GROUPS>*>(memory), given, own};
  product.prepare();
  float total[ROWS / 2] = {};
  if (threadIdx.x == 0) product.fill();
  __syncwarp();
  product.multiply_units(total);
  // Whoever stores has read activations, which came after the kernel before; the wait makes its end known to all.
  wait_for_earlier();
  if (ranks == 8) product.template store<8>(total);
  else if (ranks == 4) product.template store<4>(total);
  else if (ranks == 2) product.template store<2>(total);
  else product.template store<1>(total);
}

#define FEW_ROWS(ROWS, GROUPS)                                                                  \
  extern "C" __global__ void __launch_bounds__(GROUPS * 128, 1)                                 \
      few_rows_##ROWS##_##GROUPS(const __grid_constant__ Arguments given) {                     \
    run<ROWS, GROUPS>(given);                                                                   \
  }
FEW_ROWS(16, 3)
FEW_ROWS(32, 3)
FEW_ROWS(64, 3)
FEW_ROWS(96, 3)
FEW_ROWS(16, 4)
FEW_ROWS(32, 4)
FEW_ROWS(64, 4)
FEW_ROWS(96, 4)
