// The threads of a cluster as fibers: one runs until it waits. A seed decides which warp runs next, so that a run can be repeated.
//
// Modelled: warps in any order, threads that wait for each other, deadlocks. Not modelled: reordered or delayed plain stores.

#pragma once

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ucontext.h>
#include <vector>

namespace cuda {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int STACK_BYTES = 1 << 16, PATIENCE = 1000;

struct Dimensions {
  u32 x, y, z;
};

// Where a number of threads wait for each other, again and again.
struct Meeting {
  u64 generation = 0;
  u32 arrived = 0;
};

// What lanes have last given to each other; two rounds, since a lane may be one round ahead.
struct Warp {
  Meeting meeting;
  u64 given[2][32][4];
};

// One warpgroup's product: its threads' sums and operands. See products.h.
struct Product {
  void (*multiply)(Product&, const u8* shared);
  u64 a, b;
  bool accumulate, a_transposed, b_transposed;
  u32 issued;
  float* sums[128];
  u32 words[128][4];
};

struct Warpgroup {
  std::deque<Product> products;
  // How many products were issued by all threads, and how many are done.
  u64 issued = 0, done = 0;
};

struct Block {
  u8* shared;
  u32 shared_bytes, rank;
  Dimensions index;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  Meeting named[16];
};

struct Thread {
  Block* block;
  u32 number;
  bool started, ended;
  ucontext_t start;
  jmp_buf place;
  // It waits while the masked word has this value.
  const u64* watched;
  u64 mask, value;
  // Products issued, and how many of them each committed group ends with.
  u64 products;
  std::vector<u64> groups;
  // Pieces that it copies, whether each has landed, and how many of the first have: see copies.h. Then, how many of them each
  // committed group ends with.
  std::vector<bool> pieces;
  u64 pieces_landed;
  std::vector<u64> piece_groups;
  // Where it last arrived at the cluster's meeting.
  u64 cluster_generation = ~0ull;
};

// All threads of a cluster meet, except those that have ended.
struct Cluster {
  std::vector<Block> blocks;
  std::deque<Thread> threads;
  Meeting meeting;
  u32 ended = 0;
};

// The launch that runs.
struct Launch {
  void (*kernel)(const void* arguments);
  const void* arguments;
  Dimensions grid;
  u32 seed;
  Cluster cluster;
  Thread* running;
  jmp_buf scheduler, failed;
  // Grows whenever a thread may go on that could not before.
  u64 progress;
  char failure[256];
};
inline Launch launched;

inline u32 drawn() {
  launched.seed = launched.seed * 1664525u + 1013904223u;
  return launched.seed >> 8;
}
inline Thread& own() { return *launched.running; }
inline Block& own_block() { return *launched.running->block; }
inline u32 own_lane() { return launched.running->number % 32; }

// Lets other threads run.
inline __attribute__((noinline)) void yield() {
  if (!_setjmp(own().place)) _longjmp(launched.scheduler, 1);
}

// Ends the launch. The thread that ran last is named.
[[noreturn]] inline __attribute__((noinline)) void fail(const char* reason) {
  snprintf(launched.failure, sizeof launched.failure, "%s (block %u, thread %u)", reason, own_block().index.x, own().number);
  _longjmp(launched.failed, 1);
}

// Waits while the masked word has this value.
inline void wait_while(const u64* word, u64 mask, u64 value) {
  Thread& thread = own();
  if ((*word & mask) != value) return;
  thread.watched = word;
  thread.mask = mask;
  thread.value = value;
  yield();
  thread.watched = nullptr;
}

inline u64 arrive(Meeting& meeting, u32 threads) {
  u64 generation = meeting.generation;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    meeting.generation++;
    launched.progress++;
  }
  return generation;
}
inline void meet(Meeting& meeting, u32 threads) {
  u64 generation = arrive(meeting, threads);
  wait_while(&meeting.generation, ~0ull, generation);
}

inline void end_meeting_if_complete() {
  Cluster& cluster = launched.cluster;
  if (!cluster.meeting.arrived || cluster.meeting.arrived + cluster.ended < cluster.threads.size()) return;
  cluster.meeting.arrived = 0;
  cluster.meeting.generation++;
  launched.progress++;
}
inline void arrive_at_cluster() {
  own().cluster_generation = launched.cluster.meeting.generation;
  launched.cluster.meeting.arrived++;
  end_meeting_if_complete();
}
inline void end_thread() {
  own().ended = true;
  launched.progress++;
  Cluster& cluster = launched.cluster;
  if (own().cluster_generation == cluster.meeting.generation) cluster.meeting.arrived--;
  cluster.ended++;
  end_meeting_if_complete();
}

// Gives words to the other lanes; returns what all have given.
inline const u64 (&exchange(u64 first, u64 second = 0, u64 third = 0, u64 fourth = 0))[32][4] {
  Warp& warp = own_block().warps[own().number / 32];
  auto& given = warp.given[warp.meeting.generation % 2];
  u64 words[4] = {first, second, third, fourth};
  memcpy(given[own_lane()], words, sizeof words);
  meet(warp.meeting, 32);
  return given;
}

}  // namespace cuda
