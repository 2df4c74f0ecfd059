// Sums of all ranks' values, added in float32 in the order of the ranks and rounded once: a sum has the same bits wherever
// it is made.
//
// Values are divided into parts, of which a rank sums one (reduce-scatter), or each rank sums all of them (one-shot
// all-reduce), or a rank sums one and sends the sum to all (two-shot). NVLink carries each way (ranks - 1) / ranks of the
// values' bytes, (ranks - 1) times as many, or twice the first.

#include "sums.cuh"

constexpr int UNROLLED = SLOT_UNITS / SLOT_THREADS;

struct ReduceArguments {
  Members members;
  const uint4* input;
  uint4* output;
  // From the units that one rank sums to those of the next; 0 if each rank sums all.
  long long part_pitch;
  // How many units a rank sums.
  int units;
  // Units of a channel's turn.
  int turn_units;
  // Whether the sums are sent to all; only by words.
  int shares_sums;
};

template <class Sum, int MOST>
__device__ __forceinline__ void reduce_words(const ReduceArguments& given) {
  const Members& members = given.members;
  begin();
  u32 before = *turns(members);
  const uint4* own = given.input + members.own * given.part_pitch;
  int first = blockIdx.x * given.turn_units, count = min(given.turn_units, given.units - first);
  for (int at = threadIdx.x; at < count; at += blockDim.x) {
    uint4 mine = own[first + at];
    for (int i = 1; i < members.ranks; i++) {
      int receiver = (members.own + i) % members.ranks;
      uint4 theirs = given.part_pitch ? given.input[receiver * given.part_pitch + first + at] : mine;
      send_words(members, receiver, before + 1, at, theirs);
    }
  }
  uint4 found[MOST - 1];
  uint4* sums = given.output + (given.shares_sums ? members.own * given.part_pitch : 0);
  for (int at = threadIdx.x; at < count; at += blockDim.x) {
    uint4 mine = own[first + at];
    receive_words(members, before + 1, at, found);
    uint4 sum = sum_in_order<Sum>(members, mine, found);
    if (given.shares_sums) {
      for (int i = 1; i < members.ranks; i++) send_words(members, (members.own + i) % members.ranks, before + 2, at, sum);
    }
    sums[first + at] = sum;
  }
  if (given.shares_sums) {
    for (int at = threadIdx.x; at < count; at += blockDim.x) {
      receive_words(members, before + 2, at, found);
#pragma unroll
      for (int i = 0; i < MOST - 1; i++) {
        if (i < members.ranks - 1) given.output[other(members, i) * given.part_pitch + first + at] = found[i];
      }
    }
  }
  count_turns(members, before, given.shares_sums ? 2 : 1);
}

__device__ __forceinline__ void send_slots(const ReduceArguments& given, int first, u32 turn) {
  const Members& members = given.members;
  int last = min(first + given.turn_units, given.units);
  for (int j = 1; j < members.ranks; j++) {
    int receiver = (members.own + j) % members.ranks;
    const uint4* from = given.input + receiver * given.part_pitch;
    uint4* to = slot(members, receiver, members.own, turn);
    uint4 values[UNROLLED];
#pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      int unit = first + i * SLOT_THREADS + threadIdx.x;
      if (unit < last) values[i] = from[unit];
    }
#pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      int unit = first + i * SLOT_THREADS + threadIdx.x;
      if (unit < last) to[unit - first] = values[i];
    }
  }
}

template <class Sum, int MOST>
__device__ __forceinline__ void collect_slots(const ReduceArguments& given, int first, u32 turn) {
  const Members& members = given.members;
  int last = min(first + given.turn_units, given.units);
  const uint4* own = given.input + members.own * given.part_pitch;
#pragma unroll 2
  for (int unit = first + threadIdx.x; unit < last; unit += SLOT_THREADS) {
    uint4 mine = own[unit], found[MOST - 1];
#pragma unroll
    for (int i = 0; i < MOST - 1; i++) {
      if (i < members.ranks - 1) found[i] = slot(members, members.own, other(members, i), turn)[unit - first];
    }
    given.output[unit] = sum_in_order<Sum>(members, mine, found);
  }
}

// A turn sends one piece and adds up an earlier one.
template <class Sum, int MOST>
__device__ __forceinline__ void reduce_slots(const ReduceArguments& given) {
  const Members& members = given.members;
  begin();
  u32 before = *turns(members);
  int stride = gridDim.x * given.turn_units, first = blockIdx.x * given.turn_units;
  int count = (given.units - first + stride - 1) / stride;
  for (int turn = 1; turn <= count + LAG; turn++) {
    if (threadIdx.x >= SLOT_THREADS) {
      if (turn <= count) hand_over(members, before + turn);
      continue;
    }
    if (turn <= count) {
      send_slots(given, first + (turn - 1) * stride, before + turn);
      finish_slots(before + turn);
    }
    if (turn > LAG) {
      await_slots(members, before + turn - LAG);
      collect_slots<Sum, MOST>(given, first + (turn - LAG - 1) * stride, before + turn - LAG);
    }
  }
  count_turns(members, before, count);
}

#define REDUCE(TYPE, NAME, MOST)                                                                                            \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) words_##NAME##_##MOST(const __grid_constant__ ReduceArguments given) { \
    reduce_words<TYPE, MOST>(given);                                                                                        \
  }                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(SLOT_BLOCK) slots_##NAME##_##MOST(const __grid_constant__ ReduceArguments given) { \
    reduce_slots<TYPE, MOST>(given);                                                                                        \
  }
REDUCE(Bf16, bf16, 2)
REDUCE(Bf16, bf16, 4)
REDUCE(Bf16, bf16, 8)
REDUCE(F32, f32, 2)
REDUCE(F32, f32, 4)
REDUCE(F32, f32, 8)
