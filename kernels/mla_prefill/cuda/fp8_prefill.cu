// Attention over ragged prompts in FP8, for Hopper (sm_90a): keys 192 wide, values 128, both e4m3. Queries are bf16 and are rounded
// on the way; `fp8_reference.py` defines it.
//
// Tiles, roles and their order are those of bf16 (`attend.cuh`), with steps of 160 keys. A step takes 2 * 128 * 160 * (192 + 128)
// FLOPs, 1,600 cycles of the tensor cores, 50 KB from the second-level cache, and 20,480 exponentials, 1,280 cycles; their
// conversions seem to take half as long again. So everything else is kept from the warps: blocks are laid out in memory as shared
// memory has them, and a copy is one run of bytes; the transposition and the order of V's keys spare shuffles; and the sums of weights
// are products with ones.
//
// The tensor cores add up FP8 products with about 13 bits: over 16,384 equal values they would lose a third. So they are moved to
// float32 every SUMMED_STEPS steps, while the next scores are computed (`Earlier`). `notes.md` has what was tried.

#include "../../cuda/cluster.cuh"
#include "fp8_consume.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

struct Producer {
  Shared& shared;
  const Arguments& given;
  unsigned units = 0, keys = 0, values = 0;

  __device__ __forceinline__ void copy_queries(const Unit& unit) {
#pragma unroll
    for (int half = 0; half < CONSUMERS; half++) {
      u64* full = &shared.query_full[half];
      wait(&shared.query_empty[half], (units & 1) ^ 1);
      shared.unit[half] = unit;
      if (!unit.queries) {
        arrive(full);
        continue;
      }
      arrive_and_expect(full, QUERY_BYTES);
#pragma unroll
      for (int chunk = 0; chunk < QUERY_CHUNKS; chunk++)
        copy_box(shared.query[half] + chunk * QUERY_CHUNK_BYTES, given.query_boxes, unit.head * given.query_head + chunk * CHUNK * 2,
                 unit.first_query + half * HALF_QUERIES, full);
    }
    units++;
  }
  __device__ __forceinline__ void copy_keys(long long block) {
    unsigned stage = keys % STAGES;
    u64* full = &shared.key_full[stage];
    wait(&shared.key_empty[stage], (keys / STAGES & 1) ^ 1);
    arrive_and_expect(full, KEY_BYTES + sizeof(Scales));
    copy_run(shared.key[stage], given.keys + block * KEY_BYTES, KEY_BYTES, full);
    copy_run(&shared.scales[stage], given.scales + block, sizeof(Scales), full);
    keys++;
  }
  __device__ __forceinline__ void copy_values(long long block) {
    unsigned stage = values % STAGES;
    u64* full = &shared.value_full[stage];
    wait(&shared.value_empty[stage], (values / STAGES & 1) ^ 1);
    arrive_and_expect(full, VALUE_BYTES);
    copy_run(shared.value[stage], given.values + block * VALUE_BYTES, VALUE_BYTES, full);
    values++;
  }

  // Returns the block of the unit's last step, among all heads'.
  __device__ __forceinline__ long long take(Unit& unit, int index) const {
    int2 place = head_and_tile(given, index);
    unit.queries = unit.steps = 0;
    if (place.y < 0) return 0;
    const int4 tile = *reinterpret_cast<const int4*>(given.tiles + place.y);
    unit = {tile.x, tile.y, place.x, tile.w, (tile.w + KEYS - 1) / KEYS};
    return (long long)place.x * given.blocks + tile.z + unit.steps - 1;
  }

  // The next unit is taken while this one is computed.
  __device__ __forceinline__ void run() {
    int index = blockIdx.x;
    while (true) {
      Unit unit;
      long long block = take(unit, index);
      copy_queries(unit);
      if (!unit.queries) return end_taking(given, index);
      copy_keys(block);
#pragma unroll 1
      for (int left = unit.steps; left > 0; left--, block--) {
        if (left > 1) copy_keys(block - 1);
        copy_values(block);
        if (left == unit.steps) index = gridDim.x + atomicAdd(given.taken, 1);
      }
    }
  }
};

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int half = 0; half < CONSUMERS; half++) {
    init_barrier(&shared.query_full[half], 1);
    init_barrier(&shared.query_empty[half], WARPGROUP / 32);
  }
  for (int stage = 0; stage < STAGES; stage++) {
    init_barrier(&shared.key_full[stage], 1);
    init_barrier(&shared.value_full[stage], 1);
    init_barrier(&shared.key_empty[stage], CONSUMERS * WARPGROUP / 32);
    init_barrier(&shared.value_empty[stage], CONSUMERS * WARPGROUP / 32);
  }
  fence_barrier_init();
}

template <bool QUANTIZES>
__device__ __forceinline__ void attend(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(given.query_boxes);
    init_barriers(shared);
  }
  if (threadIdx.x < sizeof(shared.ones) / 4) reinterpret_cast<u32*>(shared.ones)[threadIdx.x] = 0x38383838;
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x < CONSUMERS * WARPGROUP) {
    take_registers<240>();
    Consumer<QUANTIZES>{shared, given, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)}.run();
  } else {
    give_registers<24>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) Producer{shared, given}.run();
  }
}

#define ATTEND(NAME, QUANTIZES)                                                                            \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared);                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ Arguments given) { \
    attend<QUANTIZES>(given);                                                                              \
  }

ATTEND(attend_prompts, false)
ATTEND(attend_prompts_and_quantize, true)
