// The choice among 256 experts in 8 groups, for Hopper (sm_90a): one CTA a token. Reads 4 bytes for each expert and share,
// writes 12 for each place. Latency limits it: that of its loads, which are all in flight at once, and of a few dozen dependent
// steps.
//
// Eight warps add up the shares. Then each thread has one expert and each warp one group. The first warp chooses: a lane holds
// four experts of one group and four of another as two sorted lists. The best expert left is the best of the lists' heads,
// which one integer reduction finds, because integer keys are ordered as the choices that they stand for.

#include "../../cuda/hopper.cuh"

constexpr int LANES = 32, GROUPS = 8, EXPERTS = GROUPS * LANES, QUADS = EXPERTS / 4;
// Shares that a warp loads at once; its registers have room for no more.
constexpr int SHARES = 2;
// Experts of a list (a lane has two lists), and lanes that share a group.
constexpr int LISTED = EXPERTS / LANES / 2, GROUP_LANES = LANES / LISTED;
// The choice of a token that no expert is to compute.
constexpr int NO_EXPERT = -1;
// Smaller than every number's key.
constexpr int TAKEN = -2147483647 - 1;
constexpr u32 ALL = ~0u;

struct Arguments {
  // [shares, tokens, experts], four logits an element.
  const float4* logits;
  const float* bias;
  // [tokens]: whether experts are to compute the token; null if they are to compute all.
  const bool* counted;
  float* weights;
  long long* experts;
  // shared: the number of shared experts, which follow the chosen ones.
  int tokens, shares, groups_per_token, shared, normalize;
  float scaling;
};

struct Shared {
  float4 logits[GROUPS][QUADS];
  float affinities[EXPERTS];
  // Four keys an element.
  int4 keys[QUADS];
  float totals[GROUPS];
  int chosen[LANES];
};

// A load that the compiler keeps in program order, so that several are in flight together; zeros if `there` is false.
__device__ __forceinline__ float4 load(const float4* from, bool there) {
  float4 found;
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n"
               " mov.f32 %0, 0f00000000;\n mov.f32 %1, 0f00000000;\n mov.f32 %2, 0f00000000;\n mov.f32 %3, 0f00000000;\n"
               " @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "=&f"(found.x), "=&f"(found.y), "=&f"(found.z), "=&f"(found.w) : "l"(from), "r"((int)there) : "memory");
  return found;
}

__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Maps the bits of a float to an integer that is ordered as the float is. The same function maps back.
__device__ __forceinline__ int key_of(int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }
__device__ __forceinline__ float number_of(int key) { return __int_as_float(key_of(key)); }

// Each warp adds up every eighth share; then each thread adds the warps' sums for its expert's logit.
__device__ __forceinline__ float add_up(const Arguments& given, Shared& shared) {
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const float4* from = given.logits + (long long)blockIdx.x * QUADS + lane;
  long long stride = (long long)given.tokens * QUADS;
  float4 found[SHARES][2];
#pragma unroll
  for (int i = 0; i < SHARES; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int share = i * GROUPS + warp;
      found[i][half] = load(from + share * stride + half * LANES, share < given.shares);
    }
#pragma unroll
  for (int half = 0; half < 2; half++) shared.logits[warp][half * LANES + lane] = add(found[0][half], found[1][half]);
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) sum += reinterpret_cast<const float*>(shared.logits[i])[threadIdx.x];
  return sum;
}

// The sum of the warp's two largest choices.
__device__ __forceinline__ float best_two(int key) {
  int first = __reduce_max_sync(ALL, key);
  u32 takers = __ballot_sync(ALL, key == first);
  int second = __reduce_max_sync(ALL, key == first ? TAKEN : key);
  return number_of(first) + number_of(__popc(takers) > 1 ? first : second);
}

// Four experts sorted by key, the best first. Their numbers are the bytes of a word, from the lowest.
struct List {
  int key[LISTED];
  u32 experts;

  __device__ __forceinline__ List(int4 keys, int first, bool kept) : key{keys.x, keys.y, keys.z, keys.w} {
    u32 expert[LISTED];
#pragma unroll
    for (int i = 0; i < LISTED; i++) expert[i] = first + i;
    order(expert, 0, 1);
    order(expert, 2, 3);
    order(expert, 0, 2);
    order(expert, 1, 3);
    order(expert, 1, 2);
    experts = expert[0] | expert[1] << 8 | expert[2] << 16 | expert[3] << 24;
#pragma unroll
    for (int i = 0; i < LISTED; i++) key[i] = kept ? key[i] : TAKEN;
  }

  __device__ __forceinline__ void order(u32 (&expert)[LISTED], int a, int b) {
    bool turn = key[a] < key[b];
    int best = max(key[a], key[b]);
    u32 first = turn ? expert[b] : expert[a];
    key[b] = min(key[a], key[b]);
    expert[b] = turn ? expert[a] : expert[b];
    key[a] = best;
    expert[a] = first;
  }

  // Every lane whose head has this key moves it to `chosen`, which has `places` places, `count` of them taken.
  __device__ __forceinline__ void take(int best, int* chosen, int places, int& count) {
    bool mine = key[0] == best;
    u32 takers = __ballot_sync(ALL, mine);
    int place = count + __popc(takers & ((1u << threadIdx.x) - 1));
    count += __popc(takers);
    if (mine && place < places) chosen[place] = experts & 0xFF;
#pragma unroll
    for (int i = 0; i < LISTED; i++) key[i] = !mine ? key[i] : i + 1 < LISTED ? key[i + 1] : TAKEN;
    experts = mine ? experts >> 8 : experts;
  }
};

// Whether a group is among the best; among equal groups the first ones are. Each of 8 lanes compares it with one other group.
__device__ __forceinline__ bool is_kept(const float* totals, int group, int groups_per_token) {
  int other = threadIdx.x % GROUPS;
  u32 before = __ballot_sync(ALL, totals[other] > totals[group] || (totals[other] == totals[group] && other < group));
  return __popc(before >> threadIdx.x / GROUPS * GROUPS & 0xFF) < groups_per_token;
}

// The first warp chooses.
template <int CHOICES>
__device__ __forceinline__ void choose_experts(const Arguments& given, Shared& shared) {
  int lane = threadIdx.x, group = lane / GROUP_LANES;
  bool keep_low = is_kept(shared.totals, group, given.groups_per_token);
  bool keep_high = is_kept(shared.totals, group + GROUPS / 2, given.groups_per_token);
  List low(shared.keys[lane], lane * LISTED, keep_low);
  List high(shared.keys[LANES + lane], EXPERTS / 2 + lane * LISTED, keep_high);
  // Equal experts may be taken in one round; then not all rounds are needed.
  int count = 0;
#pragma unroll
  for (int round = 0; round < CHOICES; round++) {
    int best = __reduce_max_sync(ALL, max(low.key[0], high.key[0]));
    low.take(best, shared.chosen, CHOICES, count);
    high.take(best, shared.chosen, CHOICES, count);
  }
  __syncwarp();
}

template <int CHOICES>
__device__ __forceinline__ void store(const Arguments& given, const Shared& shared, bool counted) {
  static_assert((CHOICES & (CHOICES - 1)) == 0, "a sum over lanes in halves");
  int lane = threadIdx.x, places = CHOICES + given.shared;
  bool real = lane < CHOICES;
  int expert = real ? shared.chosen[lane] : EXPERTS + lane - CHOICES;
  float weight = real ? shared.affinities[expert] : 0.0f, sum = weight;
#pragma unroll
  for (int step = CHOICES / 2; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  if (given.normalize) weight = __fdividef(weight, sum + 1e-20f);
  if (lane < places) {
    given.weights[(long long)blockIdx.x * places + lane] = real ? weight * given.scaling : 1.0f;
    given.experts[(long long)blockIdx.x * places + lane] = counted ? expert : NO_EXPERT;
  }
}

template <int CHOICES>
__device__ __forceinline__ void choose(const Arguments& given) {
  __shared__ Shared shared;
  start_next();
  float bias = given.bias[threadIdx.x];
  wait_for_earlier();
  bool counted = !given.counted || given.counted[blockIdx.x];
  float affinity = __fdividef(1.0f, 1.0f + __expf(-add_up(given, shared))), choice = affinity + bias;
  // NaN comes last.
  int key = key_of(__float_as_int(choice == choice ? choice : __int_as_float(0xFF800000)));
  shared.affinities[threadIdx.x] = affinity;
  reinterpret_cast<int*>(shared.keys)[threadIdx.x] = key;
  shared.totals[threadIdx.x / LANES] = best_two(key);
  __syncthreads();
  if (threadIdx.x >= LANES) return;
  choose_experts<CHOICES>(given, shared);
  store<CHOICES>(given, shared, counted);
}

extern "C" __global__ void __launch_bounds__(EXPERTS) choose_8(const __grid_constant__ Arguments given) { choose<8>(given); }
