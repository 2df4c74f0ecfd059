// The gate of few tokens for Hopper (sm_90a), from attention's output to the rows of experts: residual addition and norm, the linear
// layer in bf16 products summed in float32, the choice among experts without groups, and the list of each chosen expert's tokens.
// One cluster of 8 CTAs does it all, since what each part takes is latency: reads 4 bytes a value and 2 a weight, writes 4 bytes a
// value and 12 to 24 a choice.
//
// The CTAs share the inputs in units of 64, whose weights are copied to shared memory while the previous kernel still runs
// (programmatic dependent launch). They add up each row's squares across the cluster before its values are scaled.
// The tensor cores' 64 rows hold experts, N holds tokens. Each CTA adds up the logits of every
// eighth pair of tokens, which the others send to its shared memory, and one warp chooses a token's experts. Their numbers go to
// the first CTA, which orders all choices by expert.

#include "../../cuda/bf16_pairs.cuh"
#include "../../cuda/cluster.cuh"
#include "../../cuda/bf16_products.cuh"

constexpr int CTAS = 8, LANES = 32, GROUP_EXPERTS = 64, GROUP_THREADS = 128;
// A unit is 128 bytes (64 elements) of as many rows as there are experts or tokens, swizzled. UNITS: the most of a CTA.
constexpr int ELEMENTS = 64, LINE = 128, UNITS = 4;
// The most chosen and shared experts of a token.
constexpr int MOST_CHOICES = 8, MOST_SHARED = 8;
// For each chosen expert the plan has its number, its first row and the row after its last one, and then its tokens.
constexpr int HEADER = 4, LISTED = 32, PLAN_WIDTH = HEADER + LISTED;
constexpr int NO_EXPERT = -1, NOWHERE = -1;
// Smaller than every number's key.
constexpr int TAKEN = -2147483647 - 1;
constexpr int LEAST = 0xFF800000;
constexpr u32 ALL = ~0u;

struct Arguments {
  // [experts, width]
  TensorMap weight;
  // [tokens, width] in bf16, eight values an element: what is added, rows `delta_stride` elements apart; the residual, which is
  // changed; and the normalized rows. [width]: the norm's factors.
  const uint4 *delta, *factors;
  uint4 *residual, *plain;
  // [experts], or [tokens, experts] with rows `bias_stride` apart: no kernel just before this one writes it.
  const float* bias;
  // [tokens]: whether experts are to compute the token; null if they are to compute all.
  const bool* counted;
  // Both [tokens, choices + shared].
  float* weights;
  long long* experts;
  // [tokens, choices + shared]: the row of each choice; and [experts + shared, PLAN_WIDTH].
  long long* positions;
  int* plan;
  // shared: the number of shared experts, which follow the chosen ones.
  int tokens, units, delta_stride, bias_stride, choices, shared, normalize, softmax;
  float epsilon, scaling;
};

template <int ROWS, int EXPERTS>
struct Shared {
  u8 weight[UNITS][EXPERTS * LINE];
  u8 hidden[UNITS][ROWS * LINE];
  // Sums of each row's squares, by the CTA that sent them; the bias of this CTA's tokens.
  float squares[CTAS][ROWS], bias[ROWS / CTAS][EXPERTS];
  // By the CTA that sent it and pair of tokens: sums of two experts, 8 apart, for both tokens.
  float4 logits[CTAS][ROWS / 16][EXPERTS / 2];
  // The first CTA has: each token's choices, which are integers; the tokens of each expert, a bit each.
  float chosen[ROWS][MOST_CHOICES];
  u32 tokens[EXPERTS + MOST_SHARED];
  // Each expert's first row, and its place among those with rows; counts of the warps' experts: rows, and experts with rows.
  int start[EXPERTS + MOST_SHARED], place[EXPERTS + MOST_SHARED], totals[EXPERTS / LANES];
  // A unit's weights have arrived; all squares have; all logits have; all choices have.
  u64 full[UNITS], squared, summed, chose;
};

// Maps the bits of a float to an integer that is ordered as the float is.
__device__ __forceinline__ int key_of(int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }
__device__ __forceinline__ float number_of(int key) { return __int_as_float(key_of(key)); }

template <int ROWS, int EXPERTS>
struct Gate {
  static constexpr int THREADS = EXPERTS / GROUP_EXPERTS * GROUP_THREADS, WARPS = THREADS / LANES, OWN = EXPERTS / LANES;
  // Rows whose values a warp loads at once.
  static constexpr int AT_ONCE = ROWS / 16 < 2 ? 4 : 8;
  Shared<ROWS, EXPERTS>& shared;
  const Arguments& given;
  // This CTA's rank, and its units: every 8th one; this thread's warp and lane.
  int rank, count, warp, lane;

  // The role of one thread.
  __device__ __forceinline__ void copy_weight() const {
    for (int unit = 0; unit < count; unit++) init_barrier(&shared.full[unit], 1);
    init_barrier(&shared.squared, 1);
    init_barrier(&shared.summed, 1);
    init_barrier(&shared.chose, 1);
    fence_barrier_init();
    fence_async_proxy();
    for (int unit = 0; unit < count; unit++) {
      arrive_and_expect(&shared.full[unit], EXPERTS * LINE);
      copy_box(shared.weight[unit], given.weight, (rank + unit * CTAS) * LINE, 0, &shared.full[unit]);
    }
    arrive_and_expect(&shared.squared, CTAS * given.tokens * 4);
    arrive_and_expect(&shared.summed, (int)sizeof(shared.logits));
    arrive_and_expect(&shared.chose, given.tokens * given.choices * 4);
  }

  // The lane's eight values of a row: where they are in all rows, and in shared memory.
  __device__ __forceinline__ bool has_values() const { return lane / 8 < count; }
  __device__ __forceinline__ int eight() const { return (rank + lane / 8 * CTAS) * (ELEMENTS / 8) + lane % 8; }
  __device__ __forceinline__ uint4* held(int row) const {
    return reinterpret_cast<uint4*>(shared.hidden[lane / 8] + row * LINE + (lane % 8 ^ row % 8) * 16);
  }

  // Adds this CTA's share of each row to the residual, keeps the sums, and sends the sum of their squares to all CTAs.
  __device__ __forceinline__ void add_rows() const {
    int width = given.units * (ELEMENTS / 8);
#pragma unroll 1
    for (int first = warp * AT_ONCE; first < given.tokens; first += WARPS * AT_ONCE) {
      uint4 sums[AT_ONCE] = {}, added[AT_ONCE] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (has_values() && first + i < given.tokens) {
          added[i] = given.delta[(long long)(first + i) * given.delta_stride + eight()];
          sums[i] = given.residual[(first + i) * width + eight()];
        }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        sums[i] = sum_of(sums[i], added[i]);
        if (has_values() && first + i < given.tokens) {
          given.residual[(first + i) * width + eight()] = sums[i];
          *held(first + i) = sums[i];
        }
        float own = squares(sums[i]);
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) own += __shfl_xor_sync(ALL, own, step);
        if (lane < CTAS && first + i < given.tokens) send(&shared.squares[rank][first + i], own, &shared.squared, lane);
      }
    }
  }

  // Normalizes what `add_rows` kept: each thread the same values.
  __device__ __forceinline__ void scale_rows(uint4 factors) const {
    int width = given.units * (ELEMENTS / 8);
    wait(&shared.squared, 0);
#pragma unroll 1
    for (int first = warp * AT_ONCE; first < given.tokens; first += WARPS * AT_ONCE)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (!has_values() || first + i >= given.tokens) continue;
        float sum = 0.0f;
#pragma unroll
        for (int from = 0; from < CTAS; from++) sum += shared.squares[from][first + i];
        uint4 made = normalized(*held(first + i), rsqrtf(sum / (width * 8) + given.epsilon), factors);
        *held(first + i) = made;
        given.plain[(first + i) * width + eight()] = made;
      }
    fence_async_proxy();
    __syncthreads();
  }

  __device__ __forceinline__ void load_bias() const {
    for (int at = threadIdx.x; at < ROWS / CTAS * EXPERTS; at += THREADS)
      if (token_of(at / EXPERTS) < given.tokens)
        shared.bias[at / EXPERTS][at % EXPERTS] = given.bias[token_of(at / EXPERTS) * given.bias_stride + at % EXPERTS];
  }

  // Multiplies 64 experts of this warpgroup over all units of the CTA.
  __device__ __forceinline__ void multiply(float (&sum)[ROWS / 2]) const {
    u32 weight = shared_address(shared.weight) + warp / 4 * (GROUP_EXPERTS * LINE), hidden = shared_address(shared.hidden);
#pragma unroll 1
    for (int unit = 0; unit < count; unit++) {
      wait(&shared.full[unit], 0);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < ELEMENTS / 16; step++)
        multiply_step(sum, descriptor<1>(weight + unit * (EXPERTS * LINE) + step * 32),
                      descriptor<1>(hidden + unit * (ROWS * LINE) + step * 32), 1);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(sum);
  }

  // Pair p of tokens goes to CTA p % 8.
  __device__ __forceinline__ void send_logits(const float (&sum)[ROWS / 2]) const {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      int pair = j * 4 + lane % 4;
      send(&shared.logits[rank][pair / CTAS][warp * 8 + lane / 4],
           make_float4(sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]), &shared.summed, pair % CTAS);
    }
  }

  // This CTA's i-th token.
  __device__ __forceinline__ int token_of(int i) const { return i / 2 * (2 * CTAS) + rank * 2 + i % 2; }

  // The logit of expert k * 32 + lane for this CTA's i-th token.
  __device__ __forceinline__ float logit(int i, int k) const {
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < CTAS; from++) {
      const float4* of_pair = shared.logits[from][i / 2];
      sum += reinterpret_cast<const float*>(of_pair + k * 16 + lane / 16 * 8 + lane % 8)[lane / 8 % 2 * 2 + i % 2];
    }
    return sum;
  }

  // A softmax over the warp's logits. A NaN among them makes all results NaN.
  __device__ __forceinline__ void softmax(float (&logits)[OWN]) const {
    int largest = key_of(__float_as_int(logits[0]));
#pragma unroll
    for (int k = 1; k < OWN; k++) largest = max(largest, key_of(__float_as_int(logits[k])));
    float most = number_of(__reduce_max_sync(ALL, largest)), sum = 0.0f;
#pragma unroll
    for (int k = 0; k < OWN; k++) sum += logits[k] = __expf(logits[k] - most);
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
#pragma unroll
    for (int k = 0; k < OWN; k++) logits[k] = __fdividef(logits[k], sum);
  }

  // The role of one warp, for this CTA's i-th token.
  __device__ __forceinline__ void choose(int i) const {
    int token = token_of(i);
    bool counted = !given.counted || given.counted[token];
    float affinity[OWN];
    int key[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) affinity[k] = logit(i, k);
    if (given.softmax) {
      softmax(affinity);
    } else {
#pragma unroll
      for (int k = 0; k < OWN; k++) affinity[k] = __fdividef(1.0f, 1.0f + __expf(-affinity[k]));
    }
    // NaN comes last.
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      float choice = affinity[k] + shared.bias[i][k * LANES + lane];
      key[k] = key_of(__float_as_int(choice == choice ? choice : __int_as_float(LEAST)));
    }
    // The lane's own choice, and its affinity.
    int chosen = EXPERTS + lane - given.choices;
    float weight = 0.0f;
#pragma unroll 1
    for (int round = 0; round < given.choices; round++) {
      int best = key[0];
#pragma unroll
      for (int k = 1; k < OWN; k++) best = max(best, key[k]);
      best = __reduce_max_sync(ALL, best);
      // Among equal experts the first one.
      u32 first = EXPERTS;
#pragma unroll
      for (int k = OWN - 1; k >= 0; k--) first = key[k] == best ? k * LANES + lane : first;
      first = __reduce_min_sync(ALL, first);
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        float found = __shfl_sync(ALL, affinity[k], first % LANES);
        weight = lane == round && first / LANES == k ? found : weight;
        key[k] = first == k * LANES + lane ? TAKEN : key[k];
      }
      chosen = lane == round ? first : chosen;
    }
    float sum = weight;
#pragma unroll
    for (int step = MOST_CHOICES / 2; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (given.normalize) weight = __fdividef(weight, sum + 1e-20f);
    chosen = counted ? chosen : NO_EXPERT;
    int places = given.choices + given.shared;
    if (lane < given.choices) send(&shared.chosen[token][lane], __int_as_float(chosen), &shared.chose, 0);
    if (lane < places) {
      given.weights[token * places + lane] = lane < given.choices ? weight * given.scaling : 1.0f;
      given.experts[token * places + lane] = chosen;
    }
  }

  // The expert at one of a token's places, shared ones last.
  __device__ __forceinline__ int choice(int token, int place) const {
    int expert = __float_as_int(shared.chosen[token][place < given.choices ? place : 0]);
    return place < given.choices || expert == NO_EXPERT ? expert : EXPERTS + place - given.choices;
  }

  __device__ __forceinline__ int rows_of(int expert) const { return __popc(shared.tokens[expert]); }

  // How many of an expert's tokens come before this one.
  __device__ __forceinline__ int before(int expert, int token) const {
    return __popc(shared.tokens[expert] & ((1u << token) - 1));
  }

  // Lists the tokens of each expert: the role of the first CTA.
  __device__ __forceinline__ void list_tokens() const {
    int thread = threadIdx.x, places = given.choices + given.shared;
    for (int at = thread; at < given.tokens * places; at += THREADS) {
      int token = at / places, expert = choice(token, at % places);
      if (expert != NO_EXPERT) atomicOr(&shared.tokens[expert], 1u << token);
    }
    __syncthreads();
  }

  // Finds where the rows of each expert start, and its place in the plan: shared experts, which have most rows, stand first.
  __device__ __forceinline__ void order_experts() const {
    int thread = threadIdx.x;
    // Rows in the low half, experts with rows in the high half.
    int own = thread < EXPERTS ? rows_of(thread) : 0;
    own += own ? 1 << 16 : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      int other = __shfl_up_sync(ALL, sum, step);
      sum += lane >= step ? other : 0;
    }
    if (thread < EXPERTS && lane == LANES - 1) shared.totals[warp] = sum;
    __syncthreads();
    int earlier = 0, all = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      earlier += i < warp ? shared.totals[i] : 0;
      all += shared.totals[i];
    }
    sum += earlier - own;
    // Every token that has an expert has the shared ones.
    int each = rows_of(EXPERTS), first = each ? given.shared : 0, used = first + (all >> 16);
    if (thread < EXPERTS) {
      shared.start[thread] = sum & 0xFFFF;
      shared.place[thread] = first + (sum >> 16);
      if (own) write_header(thread, own & 0xFFFF);
    }
    __syncthreads();
    if (thread < first) {
      shared.start[EXPERTS + thread] = (all & 0xFFFF) + thread * each;
      shared.place[EXPERTS + thread] = thread;
      write_header(EXPERTS + thread, each);
    }
    for (int place = used + thread; place < EXPERTS + given.shared; place += THREADS)
      *reinterpret_cast<uint4*>(given.plan + place * PLAN_WIDTH) = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }

  __device__ __forceinline__ void write_header(int expert, int rows) const {
    int start = shared.start[expert];
    *reinterpret_cast<uint4*>(given.plan + shared.place[expert] * PLAN_WIDTH) = make_uint4(expert, start, start + rows, 0);
  }

  __device__ __forceinline__ void write_rows() const {
    int places = given.choices + given.shared;
    for (int at = threadIdx.x; at < given.tokens * places; at += THREADS) {
      int token = at / places, expert = choice(token, at % places), position = NOWHERE;
      if (expert != NO_EXPERT) {
        int index = before(expert, token);
        position = shared.start[expert] + index;
        given.plan[shared.place[expert] * PLAN_WIDTH + HEADER + index] = token;
      }
      given.positions[at] = position;
    }
  }
};

template <int ROWS, int EXPERTS>
__device__ __forceinline__ void choose_and_place(const Arguments& given) {
  using Of = Gate<ROWS, EXPERTS>;
  extern __shared__ __align__(1024) u8 memory[];
  start_next();
  int rank = cluster_rank();
  Of work{*reinterpret_cast<Shared<ROWS, EXPERTS>*>(memory), given, rank, (given.units - rank + CTAS - 1) / CTAS,
          __shfl_sync(~0u, (int)threadIdx.x / LANES, 0), (int)threadIdx.x % LANES};
  if (threadIdx.x == 0) work.copy_weight();
  for (int at = threadIdx.x; at < EXPERTS + MOST_SHARED; at += Of::THREADS) work.shared.tokens[at] = 0;
  work.load_bias();
  uint4 factors = work.has_values() ? given.factors[work.eight()] : uint4{};
  __syncthreads();
  // Peers' barriers are ready once all have arrived.
  cluster_arrive_relaxed();
  wait_for_earlier();
  cluster_wait();
  work.add_rows();
  work.scale_rows(factors);
  float sum[ROWS / 2] = {};
  work.multiply(sum);
  work.send_logits(sum);
  wait(&work.shared.summed, 0);
  for (int i = work.warp; i < ROWS / CTAS; i += Of::WARPS)
    if (work.token_of(i) < given.tokens) work.choose(i);
  __syncwarp();
  if (rank == 0) wait(&work.shared.chose, 0);
  cluster_arrive_relaxed();
  if (rank == 0) {
    work.list_tokens();
    work.order_experts();
    work.write_rows();
  }
  // A CTA must not exit while what it sent is still on its way to another.
  cluster_wait();
}

#define GATE(ROWS, EXPERTS)                                                                        \
  extern "C" __device__ int gate_##ROWS##_##EXPERTS##_shared_bytes = sizeof(Shared<ROWS, EXPERTS>); \
  extern "C" __global__ void __launch_bounds__(Gate<ROWS, EXPERTS>::THREADS, 1)                    \
      gate_##ROWS##_##EXPERTS(const __grid_constant__ Arguments given) {                           \
    choose_and_place<ROWS, EXPERTS>(given);                                                        \
  }
GATE(16, 64)
GATE(32, 64)
GATE(16, 128)
GATE(32, 128)
