// Both products of one token's experts in bf16 or in blocks of FP8, for Hopper (sm_90a). Memory should limit it from the first weight to the last.
//
// Work. All CTAs run at once, one a multiprocessor. A unit is two rows of weights, which a warp multiplies by one vector: a gate
// and what it gates of the first product, or two outputs of the last one. A warp has room in shared memory for two units. A lane
// copies what it reads itself, so that no thread waits for another one: as soon as it has read a piece of a unit, it copies
// that piece of the unit after the next one to the same place. So weights of the last product are on their way while the last
// gated values are made, and those of shared experts, which are known without the gate's choice and come first, before the
// previous kernel has ended.
//
// A counter of each chosen expert says how many gated values are stored; units of the last product wait for all of theirs.
// The last warp that waits for nothing more leaves zeros.
//
// Bytes: 2 or 1 a weight. A warp takes some 65 instructions for 1 KB of bf16, and 100 of FP8: 10 us of Moonlight's 138 MB, which
// take 33, and 8 of its 69 MB in FP8. What is between the products is bf16 in both.

#include "../../cuda/values.cuh"

constexpr int MOST_INPUTS = 2048, MOST_CHOICES = 32, COUNTER_STRIDE = 8, BLOCK = 128;
// A chunk of a unit's inputs: 16 bytes of each of two rows a lane.
constexpr int ROW_BYTES = 32 * 16, CHUNK_BYTES = 2 * ROW_BYTES;
constexpr int NOWHERE = -1;
constexpr u32 ALL = ~0u;

struct Arguments {
  // bf16 or e4m3: [experts, 2 * width, hidden] and [experts, hidden, width].
  const u8 *gate_up, *down;
  // Scales of blocks of 128x128: [experts, 2 * width / 128, hidden / 128] and [experts, hidden / 128, width / 128]; null in bf16.
  const float *gate_up_scales, *down_scales;
  // [hidden] bf16, or e4m3 with a scale of each 128, `x_scale_stride` scales apart.
  const u8* x;
  const float* x_scales;
  // [choices] of experts, numbered from `first`; the last ones are the shared experts.
  const long long* chosen;
  long long* positions;
  // bf16: [choices, width] and [choices, hidden].
  unsigned short *inner, *out;
  // [MOST_CHOICES * COUNTER_STRIDE + 1], zero between calls.
  int* progress;
  int experts, first, shared, choices, hidden, width, x_scale_stride;
  // The most units of a warp, 2 at most, that are copied before the previous kernel has ended.
  int ahead;
};

__device__ __forceinline__ void copy_piece(u32 to, const u8* from, bool there) {
  int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ __forceinline__ void count_stored(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ int count_of(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
// Past the first cache, which may have what an earlier call left.
__device__ __forceinline__ uint4 load_common(const void* from) {
  uint4 found;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from) : "memory");
  return found;
}

__device__ __forceinline__ float2 of_e4m3_pair(unsigned short packed) {
  float2 values;
  asm("{\n .reg .b16 low, high;\n .reg .b32 pair;\n cvt.rn.f16x2.e4m3x2 pair, %2;\n mov.b32 {low, high}, pair;\n"
      " cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}" : "=f"(values.x), "=f"(values.y) : "h"(packed));
  return values;
}

// 16 e4m3 values of a lane's piece.
struct Piece {
  float value[16];

  __device__ __forceinline__ explicit Piece(uint4 packed) {
    u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float2 pair = of_e4m3_pair(words[i / 2] >> i % 2 * 16 & 0xFFFF);
      value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
    }
  }
};

// What a lane holds of the vector that its warp multiplies. A chunk has PIECE values a lane.
template <bool FP8>
struct Vector;

template <>
struct Vector<false> {
  static constexpr int WARPS = 12, BYTES = 2, PIECE = 8, CHUNKS = MOST_INPUTS / (32 * PIECE);
  uint4 packed[CHUNKS];

  __device__ __forceinline__ void hold_token(const Arguments& given) { hold(given.x, given.hidden); }
  __device__ __forceinline__ void hold(const void* from, int size) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      int column = (chunk * 32 + threadIdx.x % 32) * PIECE;
      packed[chunk] = column < size ? load_common(static_cast<const u8*>(from) + column * 2) : uint4{};
    }
  }
  __device__ __forceinline__ float add(int chunk, uint4 weights, float sum) const {
    Values a = Values::of(weights), v = Values::of(packed[chunk]);
#pragma unroll
    for (int i = 0; i < PIECE; i++) sum = fmaf(a.value[i], v.value[i], sum);
    return sum;
  }
};

template <>
struct Vector<true> {
  static constexpr int WARPS = 16, BYTES = 1, PIECE = 16, CHUNKS = MOST_INPUTS / (32 * PIECE);
  float value[CHUNKS][PIECE];

  __device__ __forceinline__ void hold_token(const Arguments& given) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      int column = (chunk * 32 + threadIdx.x % 32) * PIECE;
      bool there = column < given.hidden;
      Piece piece(there ? load_common(given.x + column) : uint4{});
      float scale = there ? __ldcg(given.x_scales + (long long)(column / BLOCK) * given.x_scale_stride) : 0.0f;
#pragma unroll
      for (int i = 0; i < PIECE; i++) value[chunk][i] = piece.value[i] * scale;
    }
  }
  __device__ __forceinline__ void hold(const void* from, int size) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int column = (chunk * 32 + threadIdx.x % 32) * PIECE + half * VALUES;
        Values found = Values::of(column < size ? load_common(static_cast<const u8*>(from) + column * 2) : uint4{});
#pragma unroll
        for (int i = 0; i < VALUES; i++) value[chunk][half * VALUES + i] = found.value[i];
      }
  }
  __device__ __forceinline__ float add(int chunk, uint4 weights, float sum) const {
    Piece piece(weights);
#pragma unroll
    for (int i = 0; i < PIECE; i++) sum = fmaf(piece.value[i], value[chunk][i], sum);
    return sum;
  }
};

// The experts that the token has, each lane one: shared ones first, then those that were chosen and are here.
struct Listed {
  int place, expert, count;

  __device__ __forceinline__ explicit Listed(const Arguments& given) : count(given.shared) {
    int lane = threadIdx.x % 32;
    place = given.choices - given.shared + lane;
    expert = given.experts - given.shared + lane;
  }

  // After the choice is made.
  __device__ __forceinline__ void add_chosen(const Arguments& given) {
    int lane = threadIdx.x % 32, routed = given.choices - given.shared;
    long long choice = lane < routed ? given.chosen[lane] - given.first : -1;
    u32 here = __ballot_sync(ALL, choice >= 0 && choice < given.experts), left = here;
    for (int i = given.shared; i < lane; i++) left &= left - 1;
    int source = lane < given.shared || !left ? 0 : __ffs(left) - 1;
    int found = __shfl_sync(ALL, static_cast<int>(choice), source);
    if (lane >= given.shared) place = source, expert = found;
    count = given.shared + __popc(here);
  }
};

// Divides numbers below 2^22: (number + 1/2) / by is farther from a whole number than float32 is exact.
struct Divisor {
  int by;
  float inverse;

  __device__ __forceinline__ explicit Divisor(int by) : by(by), inverse(1.0f / by) {}
  __device__ __forceinline__ int quotient(int number) const { return static_cast<int>((number + 0.5f) * inverse); }
};

// A unit's phase, its index in it, and this lane's first pieces of its two rows.
struct Unit {
  int phase, index;
  const u8 *row, *other;
};

template <bool FP8>
struct Layer {
  using Form = Vector<FP8>;
  static constexpr int CHUNKS = Form::CHUNKS, CHUNK = 32 * Form::PIECE, UNIT_BYTES = CHUNKS * CHUNK_BYTES;
  const Arguments& given;
  Listed listed;
  // Units of an expert in each phase: 0 is the first product, 1 the last one.
  const Divisor first, last;
  // This warp's number among all. Units of the first product are dealt in turns, so that the first ones of all warps are of the
  // first experts; of the last one a warp has consecutive ones, from `begin` to `end`.
  const int warp, warps;
  int begin, end;
  // Where this lane's pieces lie.
  u32 places;
  // The latest unit that is copied, and how many were before it.
  Unit copied;
  int before;

  __device__ __forceinline__ Layer(const Arguments& given, const u8* memory)
      : given(given), listed(given), first(given.width), last(given.hidden / 2),
        warp(threadIdx.x / 32 * gridDim.x + blockIdx.x), warps(Form::WARPS * gridDim.x), begin(0), end(0),
        places(shared_address(memory) + threadIdx.x / 32 * (2 * UNIT_BYTES) + threadIdx.x % 32 * 16),
        copied{0, warp - warps, nullptr, nullptr}, before(-1) {}

  // Once all experts are known.
  __device__ __forceinline__ void share_units() {
    int units = listed.count * last.by;
    begin = units * warp / warps, end = units * (warp + 1) / warps;
  }

  __device__ __forceinline__ int inputs(int phase) const { return phase ? given.width : given.hidden; }
  __device__ __forceinline__ int gated() const { return listed.count * first.by; }

  // Whether the next unit is of a shared expert's first product.
  __device__ __forceinline__ bool is_known() const { return copied.index + warps < given.shared * first.by; }

  // Goes on to the next unit; there is none if its phase is 2.
  __device__ __forceinline__ void advance() {
    before++;
    if (copied.phase == 2) return;
    copied.index += copied.phase ? 1 : warps;
    if (copied.phase == 0 && copied.index >= gated()) copied.phase = 1, copied.index = begin;
    if (copied.phase == 1 && copied.index >= end) {
      copied.phase = 2;
      return;
    }
    int phase = copied.phase, place = phase ? last.quotient(copied.index) : first.quotient(copied.index);
    int at = copied.index - place * (phase ? last.by : first.by);
    long long expert = __shfl_sync(ALL, listed.expert, place), bytes = (long long)inputs(phase) * Form::BYTES;
    long long row = phase ? expert * given.hidden + 2 * at : expert * 2 * given.width + at;
    copied.row = (phase ? given.down : given.gate_up) + row * bytes + threadIdx.x % 32 * 16;
    copied.other = copied.row + (phase ? 1 : given.width) * bytes;
  }

  __device__ __forceinline__ u32 place(int unit, int chunk) const { return places + (unit & 1) * UNIT_BYTES + chunk * CHUNK_BYTES; }

  // Copies a chunk of the latest unit. Beyond a row's end are zeros.
  __device__ __forceinline__ void copy(int chunk) const {
    int column = chunk * CHUNK + threadIdx.x % 32 * Form::PIECE;
    if (copied.phase < 2 && chunk * CHUNK < inputs(copied.phase)) {
      bool there = column < inputs(copied.phase);
      int offset = there ? chunk * ROW_BYTES : 0;
      copy_piece(place(before, chunk), copied.row + offset, there);
      copy_piece(place(before, chunk) + ROW_BYTES, copied.other + offset, there);
    }
    end_copies();
  }

  __device__ __forceinline__ void copy_unit() {
    advance();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) copy(chunk);
  }

  // The scale of each chunk of a row, and 1 in bf16. at: of the row among all of `scales`; size: of the row.
  __device__ __forceinline__ void find_scales(float (&found)[CHUNKS], const float* scales, long long at, int size) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      int column = chunk * CHUNK + threadIdx.x % 32 * Form::PIECE;
      found[chunk] = FP8 && column < size ? __ldg(scales + at / BLOCK * (size / BLOCK) + column / BLOCK) : 1.0f;
    }
  }

  // Multiplies two rows, with these numbers among all, of the unit before the latest one by the vector, and copies the next unit.
  // size: of the vector.
  __device__ __forceinline__ float2 multiply(const Form& vector, int size, const float* scales, long long row, long long other) {
    float sum = 0.0f, second = 0.0f, row_scales[CHUNKS], other_scales[CHUNKS];
    find_scales(row_scales, scales, row, size);
    find_scales(other_scales, scales, other, size);
    advance();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      wait_for_copies<2 * CHUNKS - 1>();
      if (chunk * CHUNK < size) {
        uint4 a = load_shared(place(before, chunk)), b = load_shared(place(before, chunk) + ROW_BYTES);
        if (FP8) {
          sum = fmaf(vector.add(chunk, a, 0.0f), row_scales[chunk], sum);
          second = fmaf(vector.add(chunk, b, 0.0f), other_scales[chunk], second);
        } else {
          sum = vector.add(chunk, a, sum);
          second = vector.add(chunk, b, second);
        }
      }
      copy(chunk);
    }
#pragma unroll
    for (int by = 16; by; by /= 2) {
      sum += __shfl_xor_sync(ALL, sum, by);
      second += __shfl_xor_sync(ALL, second, by);
    }
    return make_float2(sum, second);
  }

  // The first product's units.
  __device__ __forceinline__ void gate() {
    Form x;
    x.hold_token(given);
    for (int own = warp; own < gated(); own += warps) {
      int index = first.quotient(own), place = __shfl_sync(ALL, listed.place, index);
      int expert = __shfl_sync(ALL, listed.expert, index), at = own - index * given.width;
      long long row = (long long)expert * 2 * given.width + at;
      float2 sums = multiply(x, given.hidden, given.gate_up_scales, row, row + given.width);
      if (threadIdx.x % 32) continue;
      float gated = sums.x / (1.0f + __expf(-sums.x)) * sums.y;
      given.inner[place * given.width + at] = pack_bf16(gated, 0.0f) & 0xFFFF;
      count_stored(&given.progress[index * COUNTER_STRIDE]);
    }
  }

  // The last product's units.
  __device__ __forceinline__ void finish() {
    Form inner;
    int held = -1, place = 0, expert = 0;
    for (int own = begin; own < end; own++) {
      int index = last.quotient(own);
      if (index != held) {
        if (threadIdx.x % 32 == 0)
          while (count_of(&given.progress[index * COUNTER_STRIDE]) < given.width) {}
        __syncwarp();
        held = index, place = __shfl_sync(ALL, listed.place, index), expert = __shfl_sync(ALL, listed.expert, index);
        inner.hold(given.inner + place * given.width, given.width);
      }
      long long row = (long long)expert * given.hidden + 2 * (own - index * last.by);
      float2 sums = multiply(inner, given.width, given.down_scales, row, row + 1);
      if (threadIdx.x % 32 == 0)
        reinterpret_cast<u32*>(given.out)[(place - index) * last.by + own] = pack_bf16(sums.x, sums.y);
    }
  }

  // Called when the warp waits for nothing more.
  __device__ __forceinline__ void leave() const {
    int* finished = &given.progress[MOST_CHOICES * COUNTER_STRIDE];
    if (threadIdx.x % 32 || atomicAdd(finished, 1) != warps - 1) return;
    for (int i = 0; i < listed.count; i++) given.progress[i * COUNTER_STRIDE] = 0;
    *finished = 0;
  }
};

template <bool FP8>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(16) u8 memory[];
  start_next();
  Layer<FP8> layer(given, memory);
  int filled = 0;
  for (; filled < given.ahead && layer.is_known(); filled++) layer.copy_unit();
  wait_for_earlier();
  layer.listed.add_chosen(given);
  layer.share_units();
  for (; filled < 2; filled++) layer.copy_unit();
  int lane = threadIdx.x % 32;
  if (threadIdx.x < 32 && blockIdx.x == 0 && lane < given.choices) {
    long long choice = given.chosen[lane] - given.first;
    given.positions[lane] = choice >= 0 && choice < given.experts ? lane : NOWHERE;
  }
  layer.gate();
  layer.finish();
  layer.leave();
}

#define ONE_TOKEN(NAME, FP8)                                                                              \
  extern "C" __device__ int one_token_##NAME##_shared_bytes = Vector<FP8>::WARPS * 2 * Layer<FP8>::UNIT_BYTES; \
  extern "C" __global__ void __launch_bounds__(Vector<FP8>::WARPS * 32, 1)                                 \
      one_token_##NAME(const __grid_constant__ Arguments given) {                                         \
    run<FP8>(given);                                                                                      \
  }
ONE_TOKEN(bf16, false)
ONE_TOKEN(fp8, true)
