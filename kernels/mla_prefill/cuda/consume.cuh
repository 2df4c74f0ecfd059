// Attends with 64 queries: the role of each of two warpgroups.

#pragma once

#include "bf16_products.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

// Queries as the first operand, in registers: a thread has two rows and four channels of each 16.
struct HeldQueries {
  u32 words[WIDTH / 16][4];

  __device__ __forceinline__ void take(const u8* queries) {
    int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    u32 base = shared_address(queries) + row * 128;
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++)
      load_matrices(words[step], base + step / 4 * QUERY_CHUNK_BYTES + ((step % 4 * 2 + lane / 16) ^ (row & 7)) * 16);
  }
  __device__ __forceinline__ const u32 (&operand(int step) const)[4] { return words[step]; }
};

// Queries of wide heads, which products read from shared memory.
struct SharedQueries {
  u64 first;

  __device__ __forceinline__ void take(const u8* queries) { first = descriptor<1>(shared_address(queries)); }
  __device__ __forceinline__ u64 operand(int step) const { return first + step / 4 * (QUERY_CHUNK_BYTES / 16) + step % 4 * 2; }
};

// Whether a thread's registers have room for queries besides scores, weights and sums.
constexpr bool HOLDS_QUERIES = WIDTH <= 192;
template <bool HOLDS>
struct QueriesOf { using Type = SharedQueries; };
template <>
struct QueriesOf<true> { using Type = HeldQueries; };

// QUANTIZES: whether it stores quantized outputs.
template <bool QUANTIZES>
struct Consumer {
  Shared& shared;
  const Inputs& given;
  // 0 or 1, the same for a whole warp, as the compiler knows: so descriptors stay in uniform registers.
  int half;
  // Steps scored so far.
  int count = 0;
  QueriesOf<HOLDS_QUERIES>::Type queries;

  // One lane arrives for the warp.
  __device__ __forceinline__ static void release(u64* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty);
  }
  __device__ __forceinline__ void await_keys(int step) const { wait(&shared.key_full[step % STAGES], step / STAGES & 1); }
  __device__ __forceinline__ void await_values(int step) const { wait(&shared.value_full[step % STAGES], step / STAGES & 1); }

  // Issues S = Q K^T for the next step, whose keys have arrived.
  __device__ __forceinline__ void score(float (&scores)[SCORES]) const {
    u64 key = descriptor<1>(shared_address(shared.key[count % STAGES]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++)
      multiply_keys(scores, queries.operand(step), key + step / 4 * (CHUNK_BYTES / 16) + step % 4 * 2, step > 0);
    wgmma_commit();
  }

  // Issues O += P V for the step before, whose values have arrived.
  __device__ __forceinline__ void add(float (&out)[SUMS], const u32 (&weights)[KEYS / 16][4]) const {
    u64 value = value_descriptor<CHUNK_BYTES>(shared_address(shared.value[(count - 1) % STAGES]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) add_values(out, weights[step], value + step * (16 * 128 / 16));
    wgmma_commit();
  }

  // The scores' registers are laid out as the first operand of the next product wants them.
  __device__ __forceinline__ static void pack(u32 (&weights)[KEYS / 16][4], const float (&scores)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }

  // Hides the scores of keys that the thread's rows do not see, if the step has bits that say so. step: its number in the prompt.
  __device__ __forceinline__ void hide_unseen(float (&)[SCORES], const Masks<false>&, int) const {}
  __device__ __forceinline__ void hide_unseen(float (&scores)[SCORES], const Masks<true>& masks, int step) const {
    constexpr int WORDS = KEYS / 32;
    int row = half * HALF_QUERIES + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      auto stored = reinterpret_cast<const MaskWords<KEYS>*>(&masks.mask[count % STAGES][row + side * 8]);
      MaskWords<KEYS> bits = stored[step % (MASK_KEYS / KEYS)];
      u32 words[WORDS];
#pragma unroll
      for (int i = 0; i < WORDS; i++) words[i] = bits.word[i] >> column;
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (i / 2 % 2 == side && !(words[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1)) scores[i] = -__int_as_float(0x7F800000);
    }
  }

  // Scores to weights, masked if `first` is where the step's two blocks begin. Returns whether earlier sums must be scaled down.
  __device__ __forceinline__ bool weigh(float (&scores)[SCORES], Softmax& softmax, const Sight& sight, const int* first) const {
    if (first) {
#pragma unroll
      for (int block = 0; block < 2; block++) {
        int last[2] = {sight.last[0] - first[block], sight.last[1] - first[block]};
        Softmax::hide(scores, block, last);
      }
    }
    bool raised = softmax.raise(scores, given.scale_log2);
    softmax.exponentiate(scores, given.scale_log2);
    return raised;
  }

  // Clears the values after the unit's last key: they may be NaN, which a weight of zero would not cancel. Both warpgroups do.
  __device__ __forceinline__ void clear_rest(const Unit& unit) const {
    u8* value = shared.value[count % STAGES];
#pragma unroll
    for (int block = 0; block < 2; block++) {
      for (int i = max(unit.keys - unit.blocks[block], 0) * 8 + threadIdx.x % WARPGROUP; i < BLOCK * 8; i += WARPGROUP) {
#pragma unroll
        for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++)
          *reinterpret_cast<uint4*>(value + chunk * CHUNK_BYTES + (block * BLOCK * 8 + i) * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
  }

  // A unit's first step, which has its last keys.
  __device__ __forceinline__ void begin(u32 (&weights)[KEYS / 16][4], Softmax& softmax, const Sight& sight, const Unit& unit) {
    float scores[SCORES];
    await_keys(count);
    score(scores);
    wgmma_wait<0>();
    pin(scores);
    hide_unseen(scores, shared, unit.steps - 1);
    release(&shared.key_empty[count % STAGES]);
    // Products have used the queries, so they have left shared memory. Right after their loads they may not have: an arrival does
    // not wait for loads.
    if (HOLDS_QUERIES || unit.steps == 1) release(&shared.query_empty[half]);
    weigh(scores, softmax, sight, MASKED ? nullptr : unit.blocks);
    if (unit.steps > 1) await_keys(count + 1);
    pack(weights, scores);
    if (max(unit.blocks[0], unit.blocks[1]) + BLOCK > unit.keys) {
      await_values(count);
      clear_rest(unit);
    }
    count++;
  }

  // One more step's scores, while the values of the step before are added. later: how many steps come after it.
  __device__ __forceinline__ void step(float (&out)[SUMS], u32 (&weights)[KEYS / 16][4], Softmax& softmax, const Sight& sight, int later,
                                       const int* first = nullptr) {
    bool more = later > 0;
    float scores[SCORES];
    score(scores);
    await_values(count - 1);
    add(out, weights);
    wgmma_wait<1>();
    pin(scores);
    hide_unseen(scores, shared, later);
    release(&shared.key_empty[count % STAGES]);
    if (!HOLDS_QUERIES && !more) release(&shared.query_empty[half]);
    bool raised = weigh(scores, softmax, sight, first);
    // Awaited while products are in flight, so that the next step's can be issued at once.
    if (more) await_keys(count + 1);
    wgmma_wait<0>();
    pin(out);
    pin(scores);
    release(&shared.value_empty[(count - 1) % STAGES]);
    pack(weights, scores);
    if (raised) softmax.scale_down(out);
    count++;
  }

  __device__ __forceinline__ void attend(const Unit& unit) {
    int row = half * HALF_QUERIES + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    Sight sight(unit, half, row);
    Softmax softmax;
    float out[SUMS];
    u32 weights[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) out[i] = 0.0f;
    if (unit.steps) {
      queries.take(shared.query[half]);
      begin(weights, softmax, sight, unit);
      int left = unit.steps - 1;
      if constexpr (MASKED) {
        // The bits hide the diagonal as well.
      } else if constexpr (KEYS == QUERIES) {
        // Runs at most once. It is a loop because the compiler would take a branch for one that threads may take
        // differently: then descriptors are no longer in uniform registers, and dense attention takes 10% longer.
#pragma unroll 1
        for (; left && left == unit.steps - 1 && max(unit.blocks[2], unit.blocks[3]) + BLOCK > sight.all; left--)
          step(out, weights, softmax, sight, left - 1, unit.blocks + 2);
      } else {
        // Several steps of fewer keys may lie on the diagonal. Their blocks follow one another.
        int first[2] = {unit.blocks[0] - KEYS, unit.blocks[1] - KEYS};
#pragma unroll 1
        for (; left && first[1] + BLOCK > sight.all; left--, first[0] -= KEYS, first[1] -= KEYS)
          step(out, weights, softmax, sight, left - 1, first);
      }
#pragma unroll 1
      for (; left; left--) step(out, weights, softmax, sight, left - 1);
      await_values(count - 1);
      add(out, weights);
      softmax.finish();
      wgmma_wait<0>();
      pin(out);
      release(&shared.value_empty[(count - 1) % STAGES]);
    } else {
      release(&shared.query_empty[half]);
    }
    if constexpr (QUANTIZES) {
      store_quantized(given, out, softmax, unit, row);
    } else {
      store_rows(given, out, softmax, unit, row);
      if (given.of_rows) store_log_sums(softmax, unit, row);
    }
  }

  // The logarithms of the softmax's denominators.
  __device__ __forceinline__ void store_log_sums(const Softmax& softmax, const Unit& unit, int row) const {
    if (threadIdx.x % 4) return;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      int own = row + side * 8;
      if (own < unit.queries) given.of_rows[(long long)unit.head * given.row_stride + unit.first_query + own] = softmax.log_sum(side);
    }
  }

  __device__ __forceinline__ void run() {
    for (int units = 0;; units++) {
      wait(&shared.query_full[half], units & 1);
      const Unit& found = shared.unit[half];
      Unit unit{everywhere(found.first_query), everywhere(found.queries), everywhere(found.head), everywhere(found.keys),
                everywhere(found.seen), everywhere(found.steps)};
#pragma unroll
      for (int i = 0; i < 4; i++) unit.blocks[i] = everywhere(found.blocks[i]);
      if (!unit.queries) return;
      attend(unit);
    }
  }

  // Tells the compiler that all threads of the warp have the same value: it then needs no register of each.
  __device__ __forceinline__ static int everywhere(int value) { return __shfl_sync(~0u, value, 0); }
};
