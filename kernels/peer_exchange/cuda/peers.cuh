// What the kernels of an exchange share: the region of memory that each rank of a group has and the others write, and how a
// block hands data to the same block on other ranks.
//
// Block b of a kernel exchanges with block b of the same kernel on the other ranks alone: it is a channel. A channel counts
// its turns in device memory, so that a kernel can be replayed. All ranks launch the same kernels in the same order, so they
// agree on the turn. In a turn each rank sends to every other rank, and receives from it. There are three ways:
//
// - Lines, for few bytes of any kind: 8 bytes of data travel with twice 4 bytes of their turn, which the receiver waits for.
//   No fence and no flag, but twice the bytes.
// - Words, for numbers: the receiver waits until no word is EMPTY any more, and then empties it again. A number is
//   never sent as EMPTY, which is one of the many NaNs.
// - Slots, for many bytes: plain data, then a fence, then the turn as a flag.
//
// No rank tells that it has read what was sent. Lines of turn t lie where those of turn t - 2 lay: a rank that sends
// turn t has received turn t - 1 from all, so they all have read turn t - 2. A kernel takes two turns of words at
// most, so with four places words have been emptied by an earlier kernel. Slots are received LAG turns later than
// sent: a rank that sends turn t has received turn t - 1 - LAG from all, so they all had received turn t - 2 - 2 *
// LAG before.
//
// Every wait is bounded. When its time is over, the kernel notes which rank it waited for, and this and all later
// kernels go on without waiting.

#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int MOST_RANKS = 8;
constexpr int UNIT_BYTES = 16;
// The most blocks of a kernel.
constexpr int CHANNELS = 128, SLOT_CHANNELS = 64;
// Units of a channel's turn, and places for turns, by the way to send.
constexpr int LINE_UNITS = 256, WORD_UNITS = 1024, SLOT_UNITS = 2048;
constexpr int LINE_TURNS = 2, WORD_TURNS = 4, LAG = 3, SLOT_TURNS = 2 * LAG + 2;
// Places in a region: each channel's number of turns, then flags by sender and channel, then lines, words and slots.
constexpr int FLAG_OFFSET = 4096, FLAG_STRIDE = 32, LINE_OFFSET = 65536;
constexpr int MOST_THREADS = 512;
// Slots have a warp more, which waits for fences.
constexpr int SLOT_THREADS = 512, SLOT_BLOCK = SLOT_THREADS + 32;
constexpr u32 EMPTY = ~0u;

struct State {
  // Not 0 once a wait has ended without success.
  u32 failed;
  u32 padding;
  // How long a wait may take.
  u64 nanoseconds;
};

// The ranks of a group, as one of them sees it.
struct Members {
  u8* regions[MOST_RANKS];
  // This rank's state, one for all its groups.
  State* state;
  // In host memory: receives 1 + the rank that was waited for in vain.
  u32* lost;
  // Members, the index of this one, and the rank of the first.
  int ranks, own, first;
};

// Programmatic dependent launch, see hopper.cuh.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 read(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ u32 read_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void write(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void write_release(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A wait for another rank.
class Patience {
  u64 deadline = 0;
  u32 looks = 0;

 public:
  // Whether to look again.
  __device__ __forceinline__ bool lasts(const Members& members, int member) {
    if (++looks % 64) return true;
    if (read(&members.state->failed)) return false;
    u64 now = nanoseconds();
    if (!deadline) deadline = now + *(volatile u64*)&members.state->nanoseconds;
    if (now < deadline) return true;
    write(members.lost, 1 + members.first + member);
    write(&members.state->failed, 1);
    return false;
  }
};

__device__ __forceinline__ u32* turns(const Members& members) { return (u32*)members.regions[members.own] + blockIdx.x; }

// The flag of `sender`, in the region of `receiver`.
__device__ __forceinline__ u32* flag(const Members& members, int receiver, int sender) {
  return (u32*)(members.regions[receiver] + FLAG_OFFSET + (sender * CHANNELS + blockIdx.x) * FLAG_STRIDE);
}
__device__ __forceinline__ ulonglong2* lines(const Members& members, int receiver, int sender, u32 turn) {
  int place = ((turn % LINE_TURNS) * members.ranks + sender) * CHANNELS + blockIdx.x;
  return (ulonglong2*)(members.regions[receiver] + LINE_OFFSET) + place * (2 * LINE_UNITS);
}
__device__ __forceinline__ uint4* words(const Members& members, int receiver, int sender, u32 turn) {
  int before = LINE_TURNS * members.ranks * CHANNELS * (2 * LINE_UNITS);
  int place = ((turn % WORD_TURNS) * members.ranks + sender) * CHANNELS + blockIdx.x;
  return (uint4*)(members.regions[receiver] + LINE_OFFSET) + before + place * WORD_UNITS;
}
__device__ __forceinline__ uint4* slot(const Members& members, int receiver, int sender, u32 turn) {
  int before = members.ranks * CHANNELS * (LINE_TURNS * 2 * LINE_UNITS + WORD_TURNS * WORD_UNITS);
  int place = ((turn % SLOT_TURNS) * members.ranks + sender) * SLOT_CHANNELS + blockIdx.x;
  return (uint4*)(members.regions[receiver] + LINE_OFFSET) + before + place * SLOT_UNITS;
}

// The i-th of the other members.
__device__ __forceinline__ int other(const Members& members, int i) { return i < members.own ? i : i + 1; }

__device__ __forceinline__ void send_line(ulonglong2* at, u32 first, u32 second, u32 turn) {
  u64 flag = (u64)turn << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(flag | first), "l"(flag | second) : "memory");
}
__device__ __forceinline__ ulonglong2 read_line(const ulonglong2* at) {
  ulonglong2 found;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(found.x), "=l"(found.y) : "l"(at) : "memory");
  return found;
}

// Sends bytes as unit `at` of the turn.
__device__ __forceinline__ void send_lines(const Members& members, int receiver, u32 turn, int at, uint4 unit) {
  ulonglong2* to = lines(members, receiver, members.own, turn) + at;
  send_line(to, unit.x, unit.y, turn);
  send_line(to + LINE_UNITS, unit.z, unit.w, turn);
}

// Receives unit `at` of the turn from each other rank, of which there are at most OTHERS.
template <int OTHERS>
__device__ __forceinline__ void receive_lines(const Members& members, u32 turn, int at, uint4 (&found)[OTHERS]) {
  Patience patience;
  for (int missing = 0; missing >= 0;) {
    missing = -1;
    ulonglong2 first[OTHERS], second[OTHERS];
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
      if (i >= members.ranks - 1) break;
      const ulonglong2* from = lines(members, members.own, other(members, i), turn) + at;
      first[i] = read_line(from);
      second[i] = read_line(from + LINE_UNITS);
    }
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
      if (i >= members.ranks - 1) break;
      bool whole = first[i].x >> 32 == turn && first[i].y >> 32 == turn && second[i].x >> 32 == turn && second[i].y >> 32 == turn;
      if (!whole) missing = other(members, i);
      found[i] = make_uint4((u32)first[i].x, (u32)first[i].y, (u32)second[i].x, (u32)second[i].y);
    }
    if (missing >= 0 && !patience.lasts(members, missing)) return;
  }
}

__device__ __forceinline__ u32 sendable(u32 word) { return word == EMPTY ? EMPTY >> 1 : word; }

__device__ __forceinline__ void write_words(uint4* to, uint4 unit) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
               : "memory");
}
__device__ __forceinline__ uint4 read_words(const uint4* from) {
  uint4 found;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from) : "memory");
  return found;
}

// Sends numbers as unit `at` of the turn.
__device__ __forceinline__ void send_words(const Members& members, int receiver, u32 turn, int at, uint4 unit) {
  unit = make_uint4(sendable(unit.x), sendable(unit.y), sendable(unit.z), sendable(unit.w));
  write_words(words(members, receiver, members.own, turn) + at, unit);
}

// Receives unit `at` of the turn from each other rank, of which there are at most OTHERS.
template <int OTHERS>
__device__ __forceinline__ void receive_words(const Members& members, u32 turn, int at, uint4 (&found)[OTHERS]) {
  Patience patience;
  for (int missing = 0; missing >= 0;) {
    missing = -1;
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
      if (i < members.ranks - 1) found[i] = read_words(words(members, members.own, other(members, i), turn) + at);
    }
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
      if (i >= members.ranks - 1) break;
      bool part = found[i].x == EMPTY || found[i].y == EMPTY || found[i].z == EMPTY || found[i].w == EMPTY;
      if (part) missing = other(members, i);
    }
    if (missing >= 0 && !patience.lasts(members, missing)) return;
  }
#pragma unroll
  for (int i = 0; i < OTHERS; i++) {
    if (i >= members.ranks - 1) break;
    write_words(words(members, members.own, other(members, i), turn) + at, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
  }
}

// Threads that fill slots say when they have written the turn's; they do not wait. No thread is SLOT_TURNS ahead of another: it
// would have received slots from a rank that had not received this one's.
__device__ __forceinline__ void finish_slots(u32 turn) {
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + turn % SLOT_TURNS), "n"(SLOT_BLOCK) : "memory");
}

// The last warp tells the other ranks when this rank's slots of the turn are full.
__device__ __forceinline__ void hand_over(const Members& members, u32 turn) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + turn % SLOT_TURNS), "n"(SLOT_BLOCK) : "memory");
  int i = threadIdx.x % 32;
  // Releases also what the block's other threads wrote.
  if (i < members.ranks - 1) write_release(flag(members, other(members, i), members.own), turn);
}

// Called by all threads of a warp: waits until the other ranks' slots of the turn are full.
__device__ __forceinline__ void await_slots(const Members& members, u32 turn) {
  int i = threadIdx.x % 32;
  if (i < members.ranks - 1) {
    int sender = other(members, i);
    Patience patience;
    while ((int)(read_acquire(flag(members, members.own, sender)) - turn) < 0 && patience.lasts(members, sender)) {
    }
  }
  __syncwarp();
}

// Called by all threads at a kernel's end. before: what `turns` held; every thread has read it.
__device__ __forceinline__ void count_turns(const Members& members, u32 before, u32 taken) {
  __syncthreads();
  if (threadIdx.x == 0) *turns(members) = before + taken;
}
