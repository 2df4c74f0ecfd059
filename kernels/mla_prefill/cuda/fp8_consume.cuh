// Attends with 64 queries in FP8: the role of each of two warpgroups.

#pragma once

#include "fp8_softmax.cuh"
#include "fp8_tiles.cuh"

// A thread's earlier sums: its sums are moved here from time to time, since the tensor cores' own have too few bits.
struct Earlier {
  static constexpr int QUADS = 16;
  // This thread's first quad in shared memory; the next ones lie WARPGROUP quads apart.
  float4* sums;

  __device__ __forceinline__ Earlier(Shared& shared, int half) : sums(&shared.earlier[half][0][threadIdx.x % WARPGROUP]) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) sums[i * WARPGROUP] = make_float4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void add(const float (&out)[64]) const {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4 sum = sums[i * WARPGROUP];
      sums[i * WARPGROUP] = make_float4(sum.x + out[4 * i], sum.y + out[4 * i + 1], sum.z + out[4 * i + 2], sum.w + out[4 * i + 3]);
    }
  }

  __device__ __forceinline__ void scale_down(const float (&alpha)[2]) const {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4 sum = sums[i * WARPGROUP];
      sums[i * WARPGROUP] = make_float4(sum.x * alpha[0], sum.y * alpha[0], sum.z * alpha[1], sum.w * alpha[1]);
    }
  }

  __device__ __forceinline__ void add_to(float (&out)[64]) const {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4 sum = sums[i * WARPGROUP];
      out[4 * i] += sum.x, out[4 * i + 1] += sum.y, out[4 * i + 2] += sum.z, out[4 * i + 3] += sum.w;
    }
  }
};

// QUANTIZES: whether it stores quantized outputs.
template <bool QUANTIZES>
struct Consumer {
  Shared& shared;
  const Arguments& given;
  // 0 or 1, the same for a whole warp, as the compiler knows: so descriptors stay in uniform registers.
  int half;
  // Steps scored so far.
  unsigned count = 0;
  // Where the next step's keys and the last step's values lie.
  u32 key_at, value_at;
  // Queries as the first operand: a thread has two rows and eight channels of each 32.
  u32 query[WIDTH / 32][4];
  // By row: times the scale of the keys, this makes a score an exponent of two.
  float query_scale[2];
  // The inverse of the scale of the last step's values.
  float inverse;

  // One lane arrives for the warp.
  __device__ __forceinline__ static void release(u64* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty);
  }
  __device__ __forceinline__ void await_keys(unsigned step) const { wait(&shared.key_full[step % STAGES], step / STAGES & 1); }
  __device__ __forceinline__ void await_values(unsigned step) const { wait(&shared.value_full[step % STAGES], step / STAGES & 1); }

  __device__ __forceinline__ static float low(u32 pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

  // Quantizes the queries, each row with a scale of its own.
  __device__ __forceinline__ void take_queries() {
    int lane = threadIdx.x % 32, first = threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
#pragma unroll
    for (int side = 0; side < 2; side++) {
      int row = first + side * 8;
      const u8* base = shared.query[half] + row * 128 + lane % 2 * 8;
      uint2 found[WIDTH / 16];
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < WIDTH / 16; i++) {
        found[i] = *reinterpret_cast<const uint2*>(base + i / 4 * QUERY_CHUNK_BYTES + ((i % 4 * 2 + lane % 4 / 2) ^ (row & 7)) * 16);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(low(found[i].x)), fabsf(high(found[i].x))),
                                       fmaxf(fabsf(low(found[i].y)), fabsf(high(found[i].y)))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      float scale = fmaxf(largest, SMALLEST_MAGNITUDE) / LARGEST_E4M3, inverse = 1.0f / scale;
      query_scale[side] = scale * given.scale_log2;
#pragma unroll
      for (int i = 0; i < WIDTH / 16; i++)
        query[i / 2][i % 2 * 2 + side] = pack_four(low(found[i].x) * inverse, high(found[i].x) * inverse,
                                                   low(found[i].y) * inverse, high(found[i].y) * inverse);
    }
  }

  // Issues S = Q K^T for the next step, whose keys have arrived.
  __device__ __forceinline__ void score(float (&scores)[SCORES]) const {
    u64 first = descriptor<1>(key_at), rest = descriptor<2>(key_at + KEY_REST);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 32; i++) multiply_keys(scores, query[i], i < 4 ? first + i * 2 : rest + (i - 4) * 2, i > 0);
    wgmma_commit();
  }

  // Issues O += P V for the step before, whose values have arrived, and the sums of P's rows. If FRESH, O = P V.
  template <bool FRESH>
  __device__ __forceinline__ void add(float (&out)[64], float (&sums)[4], const u32 (&weights)[KEYS / 32][4]) const {
    u64 first = descriptor<1>(value_at), rest = descriptor_32(value_at + VALUE_REST), ones = descriptor_32(shared_address(shared.ones));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 32; i++) add_values(out, weights[i], i < 4 ? first + i * 2 : rest + (i - 4) * 2, !FRESH || i > 0);
#pragma unroll
    for (int i = 0; i < KEYS / 32; i++) add_weights(sums, weights[i], ones, i > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void advance() {
    count++;
    key_at = shared_address(shared.key[count % STAGES]);
    value_at = shared_address(shared.value[(count - 1) % STAGES]);
  }

  // Scores to weights, not rounded yet; masked if the step begins with the prompt's key `begin`. Returns whether earlier sums
  // must be scaled down.
  template <bool MASKED>
  __device__ __forceinline__ bool weigh(float (&scores)[SCORES], Softmax& softmax, const Sight& sight, int begin) {
    Scales block = shared.scales[count % STAGES];
    float scale[2] = {query_scale[0] * block.key, query_scale[1] * block.key};
    if (MASKED) {
      int last[2] = {sight.last[0] - begin, sight.last[1] - begin};
      Softmax::hide(scores, last);
    }
    bool raised = softmax.raise(scores, scale, block.value_log2);
    // Released after the vote, which needs the block's scales: an arrival does not wait for loads.
    release(&shared.key_empty[count % STAGES]);
    softmax.exponentiate(scores, scale, block.value_log2);
    inverse = block.value_inverse;
    return raised;
  }

  // A unit's first step, which has its last keys.
  __device__ __forceinline__ void begin(u32 (&weights)[KEYS / 32][4], Softmax& softmax, const Sight& sight, const Unit& unit) {
    float scores[SCORES];
    await_keys(count);
    score(scores);
    wgmma_wait<0>();
    pin(scores);
    release(&shared.query_empty[half]);
    weigh<true>(scores, softmax, sight, (unit.steps - 1) * KEYS);
    Softmax::pack(weights, scores);
    if (unit.steps > 1) await_keys(count + 1);
    advance();
  }

  // One more step's scores, while the values of the step before are added. If MOVES, sums are moved to the earlier ones first.
  template <bool MASKED, bool MOVES>
  __device__ __forceinline__ void step(float (&out)[64], Earlier& earlier, u32 (&weights)[KEYS / 32][4], Softmax& softmax,
                                       const Sight& sight, bool more, int begin = 0) {
    float scores[SCORES], sums[4], before = inverse;
    score(scores);
    if (MOVES) earlier.add(out);
    await_values(count - 1);
    add<MOVES>(out, sums, weights);
    wgmma_wait<1>();
    pin(scores);
    bool raised = weigh<MASKED>(scores, softmax, sight, begin);
    // Awaited while products are in flight, so that the next step's can be issued at once.
    if (more) await_keys(count + 1);
    wgmma_wait<0>();
    pin(out);
    pin(sums);
    pin(scores);
    release(&shared.value_empty[(count - 1) % STAGES]);
    Softmax::pack(weights, scores);
    softmax.count(sums, before);
    if (raised) {
      softmax.scale_down(out);
      earlier.scale_down(softmax.alpha);
    }
    advance();
  }

  __device__ __forceinline__ void attend(const Unit& unit) {
    int row = half * HALF_QUERIES + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    Sight sight(unit, half, row);
    Softmax softmax;
    Earlier earlier(shared, half);
    float out[64], sums[4];
    u32 weights[KEYS / 32][4];
    take_queries();
#pragma unroll
    for (int i = 0; i < 64; i++) out[i] = 0.0f;
    begin(weights, softmax, sight, unit);
    int left = unit.steps - 1;
    // Runs at most once. It is a loop because the compiler would take a branch for one that threads may take
    // differently: then descriptors are no longer in uniform registers.
#pragma unroll 1
    for (; left && left == unit.steps - 1 && left * KEYS > sight.all; left--)
      step<true, false>(out, earlier, weights, softmax, sight, left > 1, (left - 1) * KEYS);
#pragma unroll 1
    while (left) {
      step<false, true>(out, earlier, weights, softmax, sight, left > 1);
      left--;
#pragma unroll 1
      for (int some = min(left, SUMMED_STEPS - 1); some; some--, left--)
        step<false, false>(out, earlier, weights, softmax, sight, left > 1);
    }
    await_values(count - 1);
    add<false>(out, sums, weights);
    wgmma_wait<0>();
    pin(out);
    pin(sums);
    release(&shared.value_empty[(count - 1) % STAGES]);
    softmax.count(sums, inverse);
    earlier.add_to(out);
    if constexpr (QUANTIZES) store_quantized(given, out, softmax, unit, row);
    else store_rows(given, out, softmax, unit, row);
  }

  __device__ __forceinline__ void run() {
    key_at = shared_address(shared.key[0]);
    for (int units = 0;; units++) {
      wait(&shared.query_full[half], units & 1);
      const Unit& found = shared.unit[half];
      Unit unit{everywhere(found.first_query), everywhere(found.queries), everywhere(found.head), everywhere(found.seen),
                everywhere(found.steps)};
      if (!unit.queries) return;
      attend(unit);
    }
  }

  // Tells the compiler that all threads of the warp have the same value: it then needs no register of each.
  __device__ __forceinline__ static int everywhere(int value) { return __shfl_sync(~0u, value, 0); }
};
