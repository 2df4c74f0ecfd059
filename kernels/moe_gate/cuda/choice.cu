// The choice among up to 256 experts in 8 groups, for Hopper (sm_90a): one CTA a token. Reads 4 bytes for each expert and share,
// writes 12 for each place. Latency limits it: that of its loads, which are all in flight at once, and of a few dozen dependent
// steps.
//
// Eight warps add up the shares. Then each thread is a slot for one expert and each warp has one group, of SIZE experts: in a group
// of less than 32 the last slots stay empty. A gate without groups has eight of them here, all of which a token may use. The first
// warp chooses: a lane holds four slots of one group and four of another as two sorted lists. The best expert left is the best of
// the lists' heads, which one integer reduction finds, because integer keys are ordered as the choices that they stand for.

#include "../../cuda/hopper.cuh"

constexpr int LANES = 32, GROUPS = 8, SLOTS = GROUPS * LANES, QUADS = SLOTS / 4;
// Shares that a warp loads at once; its registers have room for no more.
constexpr int SHARES = 2;
// Slots of a list (a lane has two lists), and lanes that share a group.
constexpr int LISTED = SLOTS / LANES / 2, GROUP_LANES = LANES / LISTED;
// The choice of a token that no expert is to compute.
constexpr int NO_EXPERT = -1;
// Smaller than every number's key; that of an empty slot too.
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
  // By slot; and four slots' keys an element.
  float affinities[SLOTS];
  int4 keys[QUADS];
  float totals[GROUPS];
  // Slots.
  int chosen[LANES];
  // For a softmax: each group's largest logit, and its sum of powers.
  float largest[GROUPS], powers[GROUPS];
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

template <int SIZE>
__device__ __forceinline__ u32 expert_of(u32 slot) { return SIZE == LANES ? slot : slot / LANES * SIZE + slot % LANES; }
// Whether the thread's slot has an expert.
template <int SIZE>
__device__ __forceinline__ bool has_expert() { return SIZE == LANES || threadIdx.x % LANES < SIZE; }

// Each warp adds up every eighth share; then each thread adds the warps' sums for its expert's logit.
template <int SIZE>
__device__ __forceinline__ float add_up(const Arguments& given, Shared& shared) {
  constexpr int OWN_QUADS = GROUPS * SIZE / 4;
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const float4* from = given.logits + (long long)blockIdx.x * OWN_QUADS + lane;
  long long stride = (long long)given.tokens * OWN_QUADS;
  float4 found[SHARES][2];
#pragma unroll
  for (int i = 0; i < SHARES; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int share = i * GROUPS + warp;
      bool there = OWN_QUADS == QUADS || half * LANES + lane < OWN_QUADS;
      found[i][half] = load(from + share * stride + half * LANES, share < given.shares && there);
    }
#pragma unroll
  for (int half = 0; half < 2; half++) shared.logits[warp][half * LANES + lane] = add(found[0][half], found[1][half]);
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) sum += reinterpret_cast<const float*>(shared.logits[i])[expert_of<SIZE>(threadIdx.x)];
  return sum;
}

__device__ __forceinline__ float sigmoid(float logit) { return __fdividef(1.0f, 1.0f + __expf(-logit)); }

// The softmax of all threads' logits. A NaN among them makes all results NaN.
__device__ __forceinline__ float softmax(float logit, Shared& shared) {
  int group = threadIdx.x / LANES;
  shared.largest[group] = number_of(__reduce_max_sync(ALL, key_of(__float_as_int(logit))));
  __syncthreads();
  float largest = shared.largest[0];
#pragma unroll
  for (int i = 1; i < GROUPS; i++) largest = fmaxf(largest, shared.largest[i]);
  float power = __expf(logit - largest), sum = power;
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  shared.powers[group] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) total += shared.powers[i];
  return __fdividef(power, total);
}

// The sum of the warp's two largest choices.
__device__ __forceinline__ float best_two(int key) {
  int first = __reduce_max_sync(ALL, key);
  u32 takers = __ballot_sync(ALL, key == first);
  int second = __reduce_max_sync(ALL, key == first ? TAKEN : key);
  return number_of(first) + number_of(__popc(takers) > 1 ? first : second);
}

// The larger, the better a group is: the sum of its two largest choices, or the largest of a softmax.
template <bool SOFTMAX>
__device__ __forceinline__ float total_of(int key) {
  if (SOFTMAX) return number_of(__reduce_max_sync(ALL, key));
  return best_two(key);
}

// Four slots sorted by key, the best first. Their numbers are the bytes of a word, from the lowest.
struct List {
  int key[LISTED];
  u32 slots;

  __device__ __forceinline__ List(int4 keys, int first, bool kept) : key{keys.x, keys.y, keys.z, keys.w} {
    u32 slot[LISTED];
#pragma unroll
    for (int i = 0; i < LISTED; i++) slot[i] = first + i;
    order(slot, 0, 1);
    order(slot, 2, 3);
    order(slot, 0, 2);
    order(slot, 1, 3);
    order(slot, 1, 2);
    slots = slot[0] | slot[1] << 8 | slot[2] << 16 | slot[3] << 24;
#pragma unroll
    for (int i = 0; i < LISTED; i++) key[i] = kept ? key[i] : TAKEN;
  }

  __device__ __forceinline__ void order(u32 (&slot)[LISTED], int a, int b) {
    bool turn = key[a] < key[b];
    int best = max(key[a], key[b]);
    u32 first = turn ? slot[b] : slot[a];
    key[b] = min(key[a], key[b]);
    slot[b] = turn ? slot[a] : slot[b];
    key[a] = best;
    slot[a] = first;
  }

  // Every lane whose head has this key moves it to `chosen`, which has `places` places, `count` of them taken.
  __device__ __forceinline__ void take(int best, int* chosen, int places, int& count) {
    bool mine = key[0] == best;
    u32 takers = __ballot_sync(ALL, mine);
    int place = count + __popc(takers & ((1u << threadIdx.x) - 1));
    count += __popc(takers);
    if (mine && place < places) chosen[place] = slots & 0xFF;
#pragma unroll
    for (int i = 0; i < LISTED; i++) key[i] = !mine ? key[i] : i + 1 < LISTED ? key[i + 1] : TAKEN;
    slots = mine ? slots >> 8 : slots;
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
  List high(shared.keys[LANES + lane], SLOTS / 2 + lane * LISTED, keep_high);
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

template <int SIZE, int CHOICES>
__device__ __forceinline__ void store(const Arguments& given, const Shared& shared, bool counted) {
  // Choices are summed by as many lanes as a power of two.
  constexpr int SUMMED = 8;
  static_assert(CHOICES <= SUMMED);
  int lane = threadIdx.x, places = CHOICES + given.shared;
  bool real = lane < CHOICES;
  int slot = real ? shared.chosen[lane] : 0, expert = real ? (int)expert_of<SIZE>(slot) : GROUPS * SIZE + lane - CHOICES;
  float weight = real ? shared.affinities[slot] : 0.0f, sum = weight;
#pragma unroll
  for (int step = SUMMED / 2; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
  if (given.normalize) weight = __fdividef(weight, sum + 1e-20f);
  if (lane < places) {
    given.weights[(long long)blockIdx.x * places + lane] = real ? weight * given.scaling : 1.0f;
    given.experts[(long long)blockIdx.x * places + lane] = counted ? expert : NO_EXPERT;
  }
}

template <int SIZE, int CHOICES, bool SOFTMAX>
__device__ __forceinline__ void choose(const Arguments& given) {
  __shared__ Shared shared;
  start_next();
  bool own = has_expert<SIZE>();
  float bias = own ? given.bias[expert_of<SIZE>(threadIdx.x)] : 0.0f;
  wait_for_earlier();
  bool counted = !given.counted || given.counted[blockIdx.x];
  constexpr int LEAST = 0xFF800000;
  float logit = add_up<SIZE>(given, shared);
  float affinity = SOFTMAX ? softmax(own ? logit : __int_as_float(LEAST), shared) : sigmoid(logit), choice = affinity + bias;
  // NaN comes last.
  int key = own ? key_of(__float_as_int(choice == choice ? choice : __int_as_float(LEAST))) : TAKEN;
  shared.affinities[threadIdx.x] = affinity;
  reinterpret_cast<int*>(shared.keys)[threadIdx.x] = key;
  shared.totals[threadIdx.x / LANES] = total_of<SOFTMAX>(key);
  __syncthreads();
  if (threadIdx.x >= LANES) return;
  choose_experts<CHOICES>(given, shared);
  store<SIZE, CHOICES>(given, shared, counted);
}

#define CHOOSE(NAME, SIZE, CHOICES, SOFTMAX)                                                           \
  extern "C" __global__ void __launch_bounds__(SLOTS) NAME(const __grid_constant__ Arguments given) {  \
    choose<SIZE, CHOICES, SOFTMAX>(given);                                                             \
  }
// DeepSeek-V3's gate, and softmax gates: DeepSeek-V2's and, without groups, V2-Lite's.
CHOOSE(choose_8_of_256, 32, 8, false)
CHOOSE(choose_6_of_160_softmax, 20, 6, true)
CHOOSE(choose_6_of_64_softmax, 8, 6, true)
