// The experts of one or two tokens, with INT4 weights: quantization of the tokens, both products, and the gate between
// them, for Hopper (sm_90a). The floor is the time to read the weights of the chosen experts, 3 * hidden * width * (1/2 +
// 1/64) bytes each.
//
// w4a8.cu deals tiles of 128 or 256 outputs: few experts have too few of them, and copies stop while a tile of the last
// product waits for its rows. Here all CTAs run at once, one on a multiprocessor, and each has about as many bytes
// (few_work.cuh), in strips of 16 outputs. Eight warps share the inputs of a few strips of the first product, for K =
// 7168 seven groups of 128 each, and add up their sums in shared memory, in order. A strip of it has the gate and up of
// eight channels. A warp makes strips of the last product alone. Weights come through a ring of each warp
// (few_feed.cuh), 147 KB a CTA, and go on to the last product's while gated rows are stored, counted and waited for:
// eight of 256 experts, 512 wide, have 157 KB of these for each of 96 CTAs, so that copies do not stop.
//
// No earlier kernel places tokens: each CTA finds the experts in the tokens' choices, and quantizes what its warps multiply,
// with the one scale that all experts share.
//
// A product of a warpgroup has 64 outputs, 16 of each of its four warps, and one operand of rows for all four. But warps
// have other inputs, or other experts. So this operand has two columns for each warp, one for each token, and a warp uses
// only the sums of its own columns. It needs no column for a token that has not chosen its expert, but this costs nothing.
//
// The order of all sums depends on the shape alone. A CTA waits for others that have started or will: those of other
// kernels, which wait for none of this one, leave their multiprocessors at their end.

#include "few_feed.cuh"
#include "outputs.cuh"
#include "products.cuh"
#include "progress.cuh"

constexpr int MOST_TOKENS = 2, THREADS = WARPS * 32, WARPGROUPS = WARPS / 4;
// The columns of a warpgroup for one group of inputs of each warp, and for how many groups of each they have room.
constexpr int COLUMNS_BYTES = 4 * MOST_TOKENS * GROUP_INPUTS, HELD_GROUPS = 8;
// What a product of decoded weights is multiplied by.
constexpr float DECODED = 512.0f;
// Counters of neighbouring places lie in different sectors of the cache. After them comes a counter of CTAs.
constexpr int COUNTER_STRIDE = 8;
// The position of a choice that no expert computes.
constexpr long long NOWHERE = -1;

struct Arguments {
  // Gate and up, whose gated outputs are the rows of the last product.
  Weight first, last;
  // [tokens, first.groups * 128] bf16.
  const u8* x;
  // [first.groups * 128]: what channels are multiplied by; null for 1.
  const float* pre_scale;
  // The scale of x, which is the same for all experts, and those of gated rows: [experts].
  const float *x_scale, *inner_scales;
  // [experts, width]: what gated values are multiplied by before they are rounded.
  const float* factors;
  // [tokens, choices]: a token's experts, which are distinct, or negative numbers.
  const long long* chosen;
  // [tokens, choices]: the row of `out`, or NOWHERE.
  long long* positions;
  // A row for each choice: [tokens * choices, width] e4m3, and [tokens * choices, hidden] bf16.
  u8* inner;
  unsigned short* out;
  // [MOST_CHOICES * COUNTER_STRIDE + 1]: zero before and after.
  int* progress;
  int tokens, choices;
};

struct Shared {
  // The products' operand: see `place_of_piece`.
  u8 columns[WARPGROUPS][HELD_GROUPS][COLUMNS_BYTES];
  u8 rings[WARPS][SLOTS * SLOT_BYTES];
  float4 sums[TEAMS][MOST_STRIPS][PARTS][8];
  Touched touched;
  // How many of the experts whose last product this CTA computes have their gated rows, in order, and whether a warp
  // asks for more.
  int ready, asks;
};

__device__ __forceinline__ void team_meets(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(PARTS * 32) : "memory");
}
__device__ __forceinline__ void warpgroup_meets(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(TEAMS + 1 + warpgroup) : "memory");
}

__device__ __forceinline__ void publish(int* to, int value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}
__device__ __forceinline__ int published(const int* from) {
  int found;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(found) : "r"(shared_address(from)) : "memory");
  return found;
}

// From the cache that multiprocessors share: other CTAs may have written it during this kernel.
__device__ __forceinline__ uint4 load_common(const u8* from) { return __ldcg(reinterpret_cast<const uint4*>(from)); }

// Where 16 bytes of a group of a column's inputs lie: the operand has its columns one after the other, in swizzled lines
// of 128 bytes.
__device__ __forceinline__ int place_of_piece(int column, int piece) {
  return column * GROUP_INPUTS + (piece ^ column) * 16;
}

// A lane's part of what its warp's columns hold: a piece of a token's groups, every second one.
struct Held {
  int token, piece, first;
  u8* to;

  __device__ __forceinline__ Held(Shared& shared, int warp, int lane)
      : token(lane / 16), piece(lane % 8), first(lane / 8 % 2),
        to(shared.columns[warp / 4][first] + place_of_piece(warp % 4 * MOST_TOKENS + token, piece)) {}

  __device__ __forceinline__ void store(int group, const uint4& values) const {
    *reinterpret_cast<uint4*>(to + (group - first) * COLUMNS_BYTES) = values;
  }
};

// Four channels in e4m3, from two words of bf16.
__device__ __forceinline__ u32 quantize(u32 low, u32 high, const float* pre_scale, float inverse) {
  float4 by = pre_scale ? *reinterpret_cast<const float4*>(pre_scale) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  u32 first = pack_e4m3(__uint_as_float(low << 16) * by.x * inverse, __uint_as_float(low & 0xFFFF0000u) * by.y * inverse);
  return first | pack_e4m3(__uint_as_float(high << 16) * by.z * inverse,
                           __uint_as_float(high & 0xFFFF0000u) * by.w * inverse) << 16;
}

// Quantizes a warp's inputs of the first product, of all tokens: every eighth group from `part` on.
__device__ __forceinline__ void hold_tokens(const Arguments& given, Shared& shared, int warp, int lane) {
  Held held(shared, warp, lane);
  float inverse = __frcp_rn(*given.x_scale);
  if (held.token >= given.tokens) return;
  int groups = given.first.groups;
#pragma unroll 2
  for (int i = held.first; i < HELD_GROUPS; i += 2) {
    int group = warp % PARTS + i * PARTS, channel = group * GROUP_INPUTS + held.piece * 16;
    if (group >= groups) break;
    const u8* from = given.x + (held.token * groups * GROUP_INPUTS + channel) * 2;
    uint4 low = load_common(from), high = load_common(from + 16);
    const float* by = given.pre_scale ? given.pre_scale + channel : nullptr;
    auto scale_at = [&](int channels) { return by ? by + channels : nullptr; };
    held.store(i, make_uint4(quantize(low.x, low.y, by, inverse), quantize(low.z, low.w, scale_at(4), inverse),
                             quantize(high.x, high.y, scale_at(8), inverse), quantize(high.z, high.w, scale_at(12), inverse)));
  }
}

template <int STRIPS>
struct Layer {
  const Arguments& given;
  Shared& shared;
  Feed<STRIPS> feed;
  int warp, lane, stage;

  __device__ __forceinline__ Layer(const Arguments& given, Shared& shared, const Work<STRIPS>& work, int warp)
      : given(given), shared(shared), feed(given.first, given.last, work, shared.touched.experts, shared.rings[0], warp),
        warp(warp), lane(threadIdx.x % 32), stage(0) {}

  // The weights of a strip's group, as the operands of four products of 32 inputs each.
  __device__ __forceinline__ static void decode_strip(u32 (&a)[4][4], u32& scales, const u8* from) {
    uint4 low = load_shared(from), high = load_shared(from + PIECES_BYTES);
    scales = *reinterpret_cast<const u32*>(from + 2 * PIECES_BYTES - threadIdx.x % 32 * 12);
    decode<false>(a[0], low.x, low.y);
    decode<false>(a[1], low.z, low.w);
    decode<false>(a[2], high.x, high.y);
    decode<false>(a[3], high.z, high.w);
  }

  // Sums of two outputs that are eight apart, each of both tokens.
  __device__ __forceinline__ static void add(float (&total)[4], const float (&sums)[4], u32 scales) {
    float first = __uint_as_float(scales << 16), second = __uint_as_float(scales & 0xFFFF0000u);
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] = fmaf(sums[i], i < 2 ? first : second, total[i]);
  }

  // One group of each strip. held: its place among the held groups; has: whether this warp has this group. If not, it
  // multiplies whatever lies there, since a product needs all four warps.
  __device__ __forceinline__ void multiply_group(int held, bool has, float (&total)[STRIPS][4]) {
    u64 b = descriptor<1>(shared_address(shared.columns[warp / 4][held]));
    // One strip is decoded while the one before it is multiplied.
    u32 a[2][4][4], scales[2];
    float sums[2][4];
    wait_for_copies<Feed<STRIPS>::STAGES - 1>();
#pragma unroll
    for (int i = 0; i < STRIPS; i++) {
      decode_strip(a[i % 2], scales[i % 2], feed.place(stage, i));
#pragma unroll
      for (int k = 0; k < 4; k++) pin(a[i % 2][k]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) multiply(sums[i % 2], a[i % 2][k], b + k * 2, k);
      wgmma_commit();
      if (!i) continue;
      wgmma_wait<1>();
      pin(sums[(i - 1) % 2]);
      if (has) add(total[i - 1], sums[(i - 1) % 2], scales[(i - 1) % 2]);
    }
    if (has) feed.copy_next();
    stage = feed.stage;
    wgmma_wait<0>();
    pin(sums[(STRIPS - 1) % 2]);
    if (has) add(total[STRIPS - 1], sums[(STRIPS - 1) % 2], scales[(STRIPS - 1) % 2]);
  }

  // The next unit's products, over `own` groups of this warp. groups: the most that any warp of this warpgroup has.
  __device__ __forceinline__ void multiply_groups(int own, int groups, float (&total)[STRIPS][4]) {
#pragma unroll 1
    for (int group = 0; group < groups; group++) multiply_group(group, group < own, total);
  }

  // Whether this lane's sums are of the warp's own columns.
  __device__ __forceinline__ bool has_own_sums() const { return lane % 4 == warp % 4; }

  // Each lane has one output of both tokens.
  __device__ __forceinline__ void store_gated(const float4 (&sums)[PARTS][8], float scale, float factor, Pairs pairs,
                                              int channel) const {
    float4 sum = sums[0][lane];
#pragma unroll
    for (int part = 1; part < PARTS; part++) {
      float4 other = sums[part][lane];
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    u32 packed = pack_e4m3(silu(sum.x * scale) * (sum.z * scale) * factor,
                           silu(sum.y * scale) * (sum.w * scale) * factor);
    int width = given.first.output_tiles * (TILE_OUTPUTS / 2);
    if (pairs.has(0)) given.inner[pairs.of(0) * width + channel] = packed & 0xFF;
    if (pairs.has(1)) given.inner[pairs.of(1) * width + channel] = packed >> 8;
  }

  // Gate and up: the team's units.
  __device__ __forceinline__ void gate() {
    int team = warp / PARTS, part = warp % PARTS, strips = given.first.strips(), groups = given.first.groups;
    int width = strips * (STRIP / 2);
    float scale = *given.x_scale * DECODED;
    for (int round = 0, number; (number = feed.work.first_unit(team, round)) < feed.work.first_units(); round++) {
      Unit unit = feed.work.unit(number, feed.work.first);
      int expert = shared.touched.experts[unit.place], strip = unit.strip + part;
      bool stores = part < STRIPS && strip < strips;
      int channel = strip * (STRIP / 2) + lane % 8;
      float factor = stores ? given.factors[expert * width + channel] : 0.0f;
      float total[STRIPS][4] = {};
      multiply_groups(feed.groups_of(part, groups), feed.groups_of(0, groups), total);
      // Wait until the sums of the round before have been read.
      if (round) team_meets(team);
      if (has_own_sums())
#pragma unroll
        for (int i = 0; i < STRIPS; i++)
          shared.sums[team][i][part][lane / 4] = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
      team_meets(team);
      if (!stores) continue;
      if (lane < 8) store_gated(shared.sums[team][part], scale, factor, shared.touched.pairs[unit.place], channel);
      count_stored(&given.progress[unit.place * COUNTER_STRIDE]);
    }
  }

  // Waits until all gated rows are stored that this CTA reads. One of its warps at a time asks: whichever gets here first.
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
    if (lane < feed.work.touched) given.progress[lane * COUNTER_STRIDE] = 0;
    if (lane == 0) given.progress[MOST_CHOICES * COUNTER_STRIDE] = 0;
  }

  // The gated rows of a unit's expert.
  __device__ __forceinline__ void hold_gated(Pairs pairs, int groups) const {
    Held held(shared, warp, lane);
    if (!pairs.has(held.token)) return;
    const u8* from = given.inner + (pairs.of(held.token) * groups * GROUP_INPUTS + held.piece * 16);
#pragma unroll
    for (int i = held.first; i < HELD_GROUPS; i += 2)
      if (i < groups) held.store(i, load_common(from + i * GROUP_INPUTS));
  }

  __device__ __forceinline__ void store(const float (&total)[4], float scale, Pairs pairs, int output) const {
    int width = given.last.output_tiles * TILE_OUTPUTS;
#pragma unroll
    for (int token = 0; token < MOST_TOKENS; token++) {
      u32 packed = pack_bf16(total[token] * scale, total[token + 2] * scale);
      unsigned short* to = given.out + pairs.of(token) * width + output;
      if (pairs.has(token)) to[0] = packed & 0xFFFF, to[8] = packed >> 16;
    }
  }

  // The warp's units of the last product.
  __device__ __forceinline__ void finish() {
    int strips = given.last.strips(), groups = given.last.groups, counted = -1;
    Range units = feed.work.last_units();
    wait_for_rows(units);
    // Done by the warp that is dealt units last.
    if (warp == PARTS - 1 && lane == 0) counted = atomicAdd(&given.progress[MOST_CHOICES * COUNTER_STRIDE], 1);
    // The first warp of a warpgroup has as many units as any.
    for (int round = 0; feed.work.last_unit(units, warp & ~3, round) < units.end; round++) {
      int number = feed.work.last_unit(units, warp, round);
      bool has = number < units.end;
      Unit unit = feed.work.unit(has ? number : units.begin, feed.work.last);
      Pairs pairs = shared.touched.pairs[unit.place];
      float scale = given.inner_scales[shared.touched.experts[unit.place]] * DECODED;
      float total[STRIPS][4] = {};
      // Wait until all have multiplied the rows of the round before.
      if (round) warpgroup_meets(warp / 4);
      hold_gated(pairs, groups);
      fence_async_proxy();
      warpgroup_meets(warp / 4);
      multiply_groups(has ? groups : 0, groups, total);
      if (!has || !has_own_sums()) continue;
#pragma unroll
      for (int i = 0; i < STRIPS; i++)
        if (unit.strip + i < strips) store(total[i], scale, pairs, (unit.strip + i) * STRIP + lane / 4);
    }
    clear(counted);
  }
};

template <int STRIPS>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  start_next();
  if (threadIdx.x == 0) shared.ready = shared.asks = 0;
  int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Work<STRIPS> work(given.first, given.last);
  wait_for_earlier();
  int choice = lane < given.tokens * given.choices ? static_cast<int>(given.chosen[lane]) : -1;
  if (warp == 0) {
    shared.touched.find(choice, given.choices);
    if (blockIdx.x == 0 && lane < given.tokens * given.choices) given.positions[lane] = choice < 0 ? NOWHERE : lane;
  }
  hold_tokens(given, shared, warp, lane);
  fence_async_proxy();
  __syncthreads();
  work.touched = shared.touched.count;
  Layer<STRIPS> layer(given, shared, work, warp);
  layer.gate();
  layer.finish();
}

#define FEW_TOKENS(STRIPS)                                                              \
  extern "C" __device__ int w4a8_few_tokens_##STRIPS##_shared_bytes = sizeof(Shared);   \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                              \
      w4a8_few_tokens_##STRIPS(const __grid_constant__ Arguments given) {               \
    run<STRIPS>(given);                                                                 \
  }
FEW_TOKENS(1)
FEW_TOKENS(2)
FEW_TOKENS(3)
