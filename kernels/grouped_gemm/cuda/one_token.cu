// Both products of one token's experts in bf16, for Hopper (sm_90a). Memory should limit it from the first weight to the last.
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
// Bytes: 2 a weight. A warp takes some 50 instructions for 1 KB: 7 us for Moonlight's 138 MB, which take 33.

#include "../../cuda/values.cuh"

constexpr int WARPS = 12, THREADS = WARPS * 32, CHUNKS = 8, MOST_CHOICES = 32, COUNTER_STRIDE = 8;
// A chunk of a unit's inputs: 16 bytes of each of two rows a lane. Places of two units.
constexpr int CHUNK = 32 * VALUES, ROW_BYTES = CHUNK * 2, CHUNK_BYTES = 2 * ROW_BYTES, UNIT_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int NOWHERE = -1;
constexpr u32 ALL = ~0u;

struct Arguments {
  // bf16: [experts, 2 * width, hidden] and [experts, hidden, width].
  const u8 *gate_up, *down;
  // [hidden] bf16, eight values an element.
  const uint4* x;
  // [choices] of experts, numbered from `first`; the last ones are the shared experts.
  const long long* chosen;
  long long* positions;
  // bf16: [choices, width] and [choices, hidden].
  unsigned short *inner, *out;
  // [MOST_CHOICES * COUNTER_STRIDE + 1], zero between calls.
  int* progress;
  int experts, first, shared, choices, hidden, width;
};

__device__ __forceinline__ void copy_piece(u32 to, const u8* from, bool there) {
  int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for the oldest chunk of two units. Chunks that a unit does not have count as well.
__device__ __forceinline__ void wait_for_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(2 * CHUNKS - 1) : "memory"); }

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

struct Layer {
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
        warp(threadIdx.x / 32 * gridDim.x + blockIdx.x), warps(WARPS * gridDim.x), begin(0), end(0),
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
    long long expert = __shfl_sync(ALL, listed.expert, place), bytes = inputs(phase) * 2ll;
    long long row = phase ? expert * given.hidden + 2 * at : expert * 2 * given.width + at;
    copied.row = (phase ? given.down : given.gate_up) + row * bytes + threadIdx.x % 32 * 16;
    copied.other = copied.row + (phase ? 1 : given.width) * bytes;
  }

  __device__ __forceinline__ u32 place(int unit, int chunk) const { return places + (unit & 1) * UNIT_BYTES + chunk * CHUNK_BYTES; }

  // Copies a chunk of the latest unit. Beyond a row's end are zeros.
  __device__ __forceinline__ void copy(int chunk) const {
    int column = chunk * CHUNK + threadIdx.x % 32 * VALUES;
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

  // Multiplies the rows of the unit before the latest one by the vector, and copies the next unit. size: of the vector.
  __device__ __forceinline__ float2 multiply(const uint4 (&vector)[CHUNKS], int size) {
    float sum = 0.0f, second = 0.0f;
    advance();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      wait_for_oldest();
      if (chunk * CHUNK < size) {
        Values a = Values::of(load_shared(place(before, chunk))), v = Values::of(vector[chunk]);
        Values b = Values::of(load_shared(place(before, chunk) + ROW_BYTES));
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
          sum = fmaf(a.value[j], v.value[j], sum);
          second = fmaf(b.value[j], v.value[j], second);
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

  __device__ __forceinline__ void hold(uint4 (&vector)[CHUNKS], const void* from, int size) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      int column = i * CHUNK + threadIdx.x % 32 * VALUES;
      vector[i] = column < size ? load_common(static_cast<const u8*>(from) + column * 2) : uint4{};
    }
  }

  // The first product's units.
  __device__ __forceinline__ void gate() {
    uint4 x[CHUNKS];
    hold(x, given.x, given.hidden);
    for (int own = warp; own < gated(); own += warps) {
      int index = first.quotient(own), place = __shfl_sync(ALL, listed.place, index);
      float2 sums = multiply(x, given.hidden);
      if (threadIdx.x % 32) continue;
      float gated = sums.x / (1.0f + __expf(-sums.x)) * sums.y;
      given.inner[place * given.width + own - index * given.width] = pack_bf16(gated, 0.0f) & 0xFFFF;
      count_stored(&given.progress[index * COUNTER_STRIDE]);
    }
  }

  // The last product's units.
  __device__ __forceinline__ void finish() {
    uint4 inner[CHUNKS];
    int held = -1, place = 0;
    for (int own = begin; own < end; own++) {
      int index = last.quotient(own);
      if (index != held) {
        if (threadIdx.x % 32 == 0)
          while (count_of(&given.progress[index * COUNTER_STRIDE]) < given.width) {}
        __syncwarp();
        held = index, place = __shfl_sync(ALL, listed.place, index);
        hold(inner, given.inner + place * given.width, given.width);
      }
      float2 sums = multiply(inner, given.width);
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

extern "C" __device__ int one_token_shared_bytes = WARPS * 2 * UNIT_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, 1) one_token(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(16) u8 memory[];
  start_next();
  Layer layer(given, memory);
  int filled = 0;
  for (; filled < 2 && layer.is_known(); filled++) layer.copy_unit();
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
