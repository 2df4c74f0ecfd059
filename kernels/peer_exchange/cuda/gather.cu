// Gathers all ranks' parts of several tensors on every rank, or those of one rank on every rank or on some.
//
// A unit is 16 bytes of a part or what is left of a line; units are numbered through all parts. A rank writes each unit to all
// other ranks' regions, from where they copy it to their outputs: NVLink carries ranks - 1 times the bytes of a rank's parts
// each way (twice that of what goes as lines), device memory reads them once more and writes them twice for each other rank.
// By slots a rank writes only to those that receive from it; the flags of its turns go to all.

#include "peers.cuh"

constexpr int MOST_PARTS = 6;
constexpr int UNROLLED = SLOT_UNITS / SLOT_THREADS;

struct Part {
  const u8* input;
  u8* output;
  // Bytes from the start of a line to the start of the next, and from one rank's part of the output to the next rank's.
  long long input_pitch, output_pitch, rank_pitch;
  // Contiguous bytes.
  long long line_bytes;
  int line_units, first_unit;
};

struct GatherArguments {
  Members members;
  Part parts[MOST_PARTS];
  int part_count, units;
  // How many of the first units are bytes of any kind, which go as lines unless all go by slots; the others are
  // numbers.
  int byte_units;
  // Units of a channel's turn.
  int turn_units;
  // By member, a bit for each one whose parts it receives; those that do not go by slots are all received.
  u32 senders[MOST_RANKS];
};

struct Unit {
  const u8* input;
  u8* output;
  long long rank_pitch;
  int bytes;
};

__device__ __forceinline__ Unit find(const GatherArguments& given, int number) {
  int index = 0;
  while (index + 1 < given.part_count && number >= given.parts[index + 1].first_unit) index++;
  const Part& part = given.parts[index];
  int line = 0, at = number - part.first_unit;
  // Most parts are one line, and a division takes long.
  if (at >= part.line_units) {
    line = at / part.line_units;
    at -= line * part.line_units;
  }
  long long column = (long long)at * UNIT_BYTES;
  return {part.input + line * part.input_pitch + column, part.output + line * part.output_pitch + column, part.rank_pitch,
          (int)min((long long)UNIT_BYTES, part.line_bytes - column)};
}

__device__ __forceinline__ bool is_whole(const void* at, int bytes) { return bytes == UNIT_BYTES && (u64)at % UNIT_BYTES == 0; }

__device__ __forceinline__ uint4 load(const u8* from, int bytes) {
  if (is_whole(from, bytes)) return *(const uint4*)from;
  u32 words[4] = {};
#pragma unroll
  for (int i = 0; i < UNIT_BYTES; i++) {
    if (i < bytes) words[i / 4] |= (u32)from[i] << i % 4 * 8;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store(u8* to, uint4 value, int bytes) {
  if (is_whole(to, bytes)) {
    *(uint4*)to = value;
    return;
  }
  u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < UNIT_BYTES; i++) {
    if (i < bytes) to[i] = (u8)(words[i / 4] >> i % 4 * 8);
  }
}

__device__ __forceinline__ bool receives(const GatherArguments& given, int member, int sender) {
  return given.senders[member] >> sender & 1;
}

// The number of unit `at` of this block's turn. Blocks take turns by warps, so that each has few units that go as lines.
__device__ __forceinline__ int number_of(int at) { return (at / 32 * gridDim.x + blockIdx.x) * 32 + at % 32; }

template <int MOST>
__device__ __forceinline__ void gather_units(const GatherArguments& given) {
  const Members& members = given.members;
  begin();
  u32 before = *turns(members);
  for (int at = threadIdx.x; at < given.turn_units && number_of(at) < given.units; at += blockDim.x) {
    bool as_lines = number_of(at) < given.byte_units;
    Unit unit = find(given, number_of(at));
    uint4 value = load(unit.input, unit.bytes);
    for (int i = 1; i < members.ranks; i++) {
      int receiver = (members.own + i) % members.ranks;
      if (as_lines) {
        send_lines(members, receiver, before + 1, at, value);
      } else {
        send_words(members, receiver, before + 1, at, value);
      }
    }
    store(unit.output + members.own * unit.rank_pitch, value, unit.bytes);
  }
  for (int at = threadIdx.x; at < given.turn_units && number_of(at) < given.units; at += blockDim.x) {
    Unit unit = find(given, number_of(at));
    uint4 found[MOST - 1];
    if (number_of(at) < given.byte_units) {
      receive_lines(members, before + 1, at, found);
    } else {
      receive_words(members, before + 1, at, found);
    }
#pragma unroll
    for (int i = 0; i < MOST - 1; i++) {
      if (i < members.ranks - 1) store(unit.output + other(members, i) * unit.rank_pitch, found[i], unit.bytes);
    }
  }
  count_turns(members, before, 1);
}

// Sends the units from `first` on to those that receive them, itself included, which has a place in its output for them.
__device__ __forceinline__ void send_slots(const GatherArguments& given, int first, u32 turn) {
  const Members& members = given.members;
  int last = min(first + given.turn_units, given.units);
  uint4 values[UNROLLED];
#pragma unroll
  for (int i = 0; i < UNROLLED; i++) {
    int number = first + i * SLOT_THREADS + threadIdx.x;
    if (number >= last) break;
    Unit unit = find(given, number);
    values[i] = load(unit.input, unit.bytes);
  }
  for (int j = 1; j < members.ranks; j++) {
    int receiver = (members.own + j) % members.ranks;
    if (!receives(given, receiver, members.own)) continue;
    uint4* to = slot(members, receiver, members.own, turn);
#pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      int number = first + i * SLOT_THREADS + threadIdx.x;
      if (number < last) to[number - first] = values[i];
    }
  }
  if (!receives(given, members.own, members.own)) return;
#pragma unroll
  for (int i = 0; i < UNROLLED; i++) {
    int number = first + i * SLOT_THREADS + threadIdx.x;
    if (number >= last) break;
    Unit unit = find(given, number);
    store(unit.output + members.own * unit.rank_pitch, values[i], unit.bytes);
  }
}

__device__ __forceinline__ void collect_slots(const GatherArguments& given, int first, u32 turn) {
  const Members& members = given.members;
  int last = min(first + given.turn_units, given.units);
  for (int j = 0; j < members.ranks - 1; j++) {
    int sender = other(members, j);
    if (!receives(given, members.own, sender)) continue;
    const uint4* from = slot(members, members.own, sender, turn);
    uint4 values[UNROLLED];
#pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      int number = first + i * SLOT_THREADS + threadIdx.x;
      if (number < last) values[i] = from[number - first];
    }
#pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      int number = first + i * SLOT_THREADS + threadIdx.x;
      if (number >= last) break;
      Unit unit = find(given, number);
      store(unit.output + sender * unit.rank_pitch, values[i], unit.bytes);
    }
  }
}

// A turn sends one piece and collects an earlier one: where the output is the input, the same threads have sent what they
// write over. Without units it is a barrier.
extern "C" __global__ void __launch_bounds__(SLOT_BLOCK) gather_slots(const __grid_constant__ GatherArguments given) {
  const Members& members = given.members;
  begin();
  u32 before = *turns(members);
  int stride = gridDim.x * given.turn_units, first = blockIdx.x * given.turn_units;
  int count = max((given.units - first + stride - 1) / max(stride, 1), 1);
  bool sends = false;
  for (int member = 0; member < members.ranks; member++) sends |= receives(given, member, members.own);
  for (int turn = 1; turn <= count + LAG; turn++) {
    if (threadIdx.x >= SLOT_THREADS) {
      if (turn <= count) hand_over(members, before + turn);
      continue;
    }
    if (turn <= count) {
      if (sends) send_slots(given, first + (turn - 1) * stride, before + turn);
      finish_slots(before + turn);
    }
    if (turn > LAG) {
      await_slots(members, before + turn - LAG);
      collect_slots(given, first + (turn - LAG - 1) * stride, before + turn - LAG);
    }
  }
  count_turns(members, before, count);
}

#define GATHER_UNITS(MOST)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) gather_units_##MOST(const __grid_constant__ GatherArguments given) { \
    gather_units<MOST>(given);                                                                                                   \
  }
GATHER_UNITS(2)
GATHER_UNITS(4)
GATHER_UNITS(8)
