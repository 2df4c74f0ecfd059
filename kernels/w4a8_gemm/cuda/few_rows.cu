// Both products of experts with INT4 weights, and the gate between them, where an expert has at most eight rows: for
// Hopper (sm_90a). The floor is the time to read the weights of the experts that have rows, 3 * hidden * width * (1/2 +
// 1/64) bytes each.
//
// w4a8.cu deals tiles of 128 or 256 outputs: few experts have too few of them, and copies stop while a tile of the last
// product waits for its rows. Here all CTAs run at once, one on a multiprocessor, and each has about as many bytes
// (few_work.cuh), in strips of 16 outputs. Eight warps share the inputs of a few strips of the first product, for K =
// 7168 seven groups of 128 each, and add up their sums in shared memory, in order. A strip of it has the gate and up of
// eight channels. A warp makes strips of the last product alone. Weights come through a ring of each warp
// (few_feed.cuh), 165 KB a CTA, and go on to the last product's while gated rows are stored, counted and waited for:
// eight of 256 experts, 512 wide, have 157 KB of these for each of 96 CTAs, so that copies do not stop.
//
// Eight weights take five instructions of the integer pipes, at half rate: 80 clocks for a strip's group of 1,056
// bytes, 93 GB/s a multiprocessor at 1.75 GHz. Rows are converted once for all strips of a unit.
//
// The order of all sums depends on the shape alone. A CTA waits for others that have started or will: those of other
// kernels, which wait for none of this one, leave their multiprocessors at their end.

#include "few_feed.cuh"
#include "halves.cuh"
#include "outputs.cuh"
#include "progress.cuh"

constexpr int MOST_ROWS = 8, THREADS = WARPS * 32;
// Counters of neighbouring experts lie in different sectors of the cache; behind them one of CTAs.
constexpr int COUNTER_STRIDE = 8;

struct Arguments {
  // Gate and up, whose gated outputs are the rows of the last product.
  Weight first, last;
  // [experts, capacity, first.groups * 128] e4m3.
  const u8* x;
  // [experts], of x and of gated rows.
  const float *x_scales, *inner_scales;
  // [experts], the rows of each.
  const int* counts;
  // [experts, width]: what gated values are multiplied by before they are rounded.
  const float* factors;
  // [experts, capacity, width] e4m3.
  u8* inner;
  // [MOST_EXPERTS * COUNTER_STRIDE + 1]: zero before and after.
  int* progress;
  unsigned short* out;
  int experts, capacity;
};

struct Shared {
  u8 rings[WARPS][SLOTS * SLOT_BYTES];
  float4 sums[TEAMS][MOST_STRIPS][PARTS][32];
  int touched[MOST_EXPERTS], of_warp[WARPS];
  // How many of the experts whose last product this CTA computes have their gated rows, in order, and whether a warp
  // asks for more.
  int ready, asks;
};

__device__ __forceinline__ void team_meets(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(PARTS * 32) : "memory");
}

__device__ __forceinline__ void publish(int* to, int value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}
__device__ __forceinline__ int published(const int* from) {
  int found;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(found) : "r"(shared_address(from)) : "memory");
  return found;
}

// This lane's words of a row's group: of each 16 inputs four. From the cache that multiprocessors share, for gated rows
// come from others.
__device__ __forceinline__ void load_words(u32 (&words)[8], const u8* row) {
#pragma unroll
  for (int i = 0; i < 8; i++) words[i] = row ? __ldcg(reinterpret_cast<const u32*>(row + i * 16)) : 0;
}

template <int STRIPS>
struct Layer {
  const Arguments& given;
  Shared& shared;
  Feed<STRIPS> feed;
  int warp, lane, stage;

  __device__ __forceinline__ Layer(const Arguments& given, Shared& shared, const Work<STRIPS>& work, int warp)
      : given(given), shared(shared), feed(given.first, given.last, work, shared.touched, shared.rings[0], warp),
        warp(warp), lane(threadIdx.x % 32), stage(0) {}

  __device__ __forceinline__ static void add(float (&total)[4], const float (&even)[4], const float (&odd)[4],
                                             u32 scales) {
    float first = __uint_as_float(scales << 16), second = __uint_as_float(scales & 0xFFFF0000u);
    total[0] = fmaf(even[0] + odd[0], first, total[0]);
    total[1] = fmaf(even[1] + odd[1], first, total[1]);
    total[2] = fmaf(even[2] + odd[2], second, total[2]);
    total[3] = fmaf(even[3] + odd[3], second, total[3]);
  }

  // A strip's products over a group, in two chains that do not wait for each other.
  __device__ __forceinline__ void multiply_strip(const u8* from, const u32 (&b)[8][2], float (&total)[4]) const {
    uint4 low = load_shared(from), high = load_shared(from + PIECES_BYTES);
    u32 scales = *reinterpret_cast<const u32*>(from + 2 * PIECES_BYTES - lane * 12);
    u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 a[4];
      decode_halves(a, words[i]);
      multiply_halves(i % 2 ? odd : even, a, b[i]);
    }
    add(total, even, odd, scales);
  }

  // The next unit's products, over every `step`th group. row: this lane's first inputs of row lane / 4, null if there
  // is no such row.
  __device__ __forceinline__ void multiply(const u8* row, int groups, int step, float (&total)[STRIPS][4]) {
    u32 words[8];
    if (groups) load_words(words, row);
#pragma unroll 1
    for (int group = 1; group <= groups; group++) {
      u32 b[8][2];
#pragma unroll
      for (int i = 0; i < 8; i++) widen(b[i], words[i]);
      if (row) row += step * GROUP_INPUTS;
      if (group < groups) load_words(words, row);
      wait_for_copies<Feed<STRIPS>::STAGES - 1>();
#pragma unroll
      for (int i = 0; i < STRIPS; i++) multiply_strip(feed.place(stage, i), b, total[i]);
      feed.copy_next();
      stage = feed.stage;
    }
  }

  __device__ __forceinline__ const u8* row_of(const u8* rows, int expert, int count, int groups, int group) const {
    int row = lane / 4;
    if (row >= count) return nullptr;
    return rows + ((expert * given.capacity + row) * (long long)groups + group) * GROUP_INPUTS + lane % 4 * 4;
  }

  __device__ __forceinline__ void store_gated(const float4 (&sums)[PARTS][32], float scale, float factor, u8* to,
                                              int rows) const {
    float4 sum = sums[0][lane];
#pragma unroll
    for (int part = 1; part < PARTS; part++) {
      float4 other = sums[part][lane];
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    u32 packed = pack_e4m3(silu(sum.x * scale) * (sum.z * scale) * factor,
                           silu(sum.y * scale) * (sum.w * scale) * factor);
    int row = lane % 4 * 2, width = given.first.output_tiles * (TILE_OUTPUTS / 2);
    to += row * width + lane / 4;
    if (row < rows) *to = packed & 0xFF;
    if (row + 1 < rows) to[width] = packed >> 8;
  }

  // Gate and up: the team's units.
  __device__ __forceinline__ void gate() {
    int team = warp / PARTS, part = warp % PARTS, strips = given.first.strips(), groups = given.first.groups;
    int width = strips * (STRIP / 2);
    for (int round = 0, number; (number = feed.work.first_unit(team, round)) < feed.work.first_units(); round++) {
      Unit unit = feed.work.unit(number, feed.work.first);
      int expert = shared.touched[unit.place] & 0xFFFF, rows = shared.touched[unit.place] >> 16;
      int strip = unit.strip + part;
      bool stores = part < STRIPS && strip < strips;
      float scale = given.x_scales[expert] * DECODED;
      float factor = stores ? given.factors[expert * width + strip * (STRIP / 2) + lane / 4] : 0.0f;
      float total[STRIPS][4] = {};
      multiply(row_of(given.x, expert, rows, groups, part), feed.groups_of(part, groups), PARTS, total);
      // Wait until the sums of the round before have been read.
      if (round) team_meets(team);
#pragma unroll
      for (int i = 0; i < STRIPS; i++)
        shared.sums[team][i][part][lane] = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
      team_meets(team);
      if (!stores) continue;
      u8* to = given.inner + expert * given.capacity * (long long)width + strip * (STRIP / 2);
      store_gated(shared.sums[team][part], scale, factor, to, rows);
      count_stored(&given.progress[unit.place * COUNTER_STRIDE]);
    }
  }

  __device__ __forceinline__ void store(const float (&total)[4], float scale, unsigned short* to, int rows) const {
    int row = lane % 4 * 2, width = given.last.output_tiles * TILE_OUTPUTS;
    to += row * (long long)width + lane / 4;
    u32 first = pack_bf16(total[0] * scale, total[1] * scale), second = pack_bf16(total[2] * scale, total[3] * scale);
    if (row < rows) to[0] = first & 0xFFFF, to[8] = second & 0xFFFF;
    if (row + 1 < rows) to[width] = first >> 16, to[width + 8] = second >> 16;
  }

  // Waits until all gated rows are stored that this CTA reads. One of its warps at a time asks, whichever is here.
  __device__ __forceinline__ void wait_for_rows(const Range& units) const {
    int place = feed.work.last.quotient(units.begin);
    int experts = units.begin < units.end ? feed.work.last.quotient(units.end - 1) - place + 1 : 0;
    if (lane == 0) {
      for (int ready; (ready = published(&shared.ready)) < experts;) {
        if (atomicExch(&shared.asks, 1)) {
          // Others of this multiprocessor may still multiply.
          __nanosleep(20);
          continue;
        }
        ready = published(&shared.ready);
        if (ready < experts && count_of(&given.progress[(place + ready) * COUNTER_STRIDE]) == given.first.strips())
          publish(&shared.ready, ready + 1);
        atomicExch(&shared.asks, 0);
      }
    }
    __syncwarp();
  }

  // The last CTA that has seen its counters leaves zeros. counted: this CTA's number among those, in the warp that has
  // counted it.
  __device__ __forceinline__ void clear(int counted) const {
    if (__shfl_sync(~0u, counted, 0) != gridDim.x - 1) return;
    for (int place = lane; place < feed.work.touched; place += 32) given.progress[place * COUNTER_STRIDE] = 0;
    if (lane == 0) given.progress[MOST_EXPERTS * COUNTER_STRIDE] = 0;
  }

  // The warp's units of the last product.
  __device__ __forceinline__ void finish() {
    int strips = given.last.strips(), groups = given.last.groups, counted = -1;
    Range units = feed.work.last_units();
    wait_for_rows(units);
    // Done by the warp that is dealt units last.
    if (warp == PARTS - 1 && lane == 0) counted = atomicAdd(&given.progress[MOST_EXPERTS * COUNTER_STRIDE], 1);
    for (int round = 0, number; (number = feed.work.last_unit(units, warp, round)) < units.end; round++) {
      Unit unit = feed.work.unit(number, feed.work.last);
      int expert = shared.touched[unit.place] & 0xFFFF, rows = shared.touched[unit.place] >> 16;
      float scale = given.inner_scales[expert] * DECODED;
      float total[STRIPS][4] = {};
      multiply(row_of(given.inner, expert, rows, groups, 0), groups, 1, total);
      unsigned short* to = given.out + expert * given.capacity * (long long)(strips * STRIP) + unit.strip * STRIP;
#pragma unroll
      for (int i = 0; i < STRIPS; i++)
        if (unit.strip + i < strips) store(total[i], scale, to + i * STRIP, rows);
    }
    clear(counted);
  }
};

template <int STRIPS>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  start_next();
  if (threadIdx.x == 0) shared.ready = shared.asks = 0;
  int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  Work<STRIPS> work(given.first, given.last);
  wait_for_earlier();
  work.touched = find_touched(given.counts, given.experts, MOST_ROWS, shared.of_warp, shared.touched);
  Layer<STRIPS> layer(given, shared, work, warp);
  layer.gate();
  layer.finish();
}

#define FEW_ROWS(STRIPS)                                                              \
  extern "C" __device__ int w4a8_few_rows_##STRIPS##_shared_bytes = sizeof(Shared);   \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                            \
      w4a8_few_rows_##STRIPS(const __grid_constant__ Arguments given) {               \
    run<STRIPS>(given);                                                               \
  }
FEW_ROWS(1)
FEW_ROWS(2)
FEW_ROWS(3)
