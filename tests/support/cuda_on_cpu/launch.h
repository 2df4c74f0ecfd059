// Runs a grid, one cluster after another, and within a cluster warps and copies in an order that the seed decides. It also decides
// with which of the rows of clusters that lie along x a grid begins.

#pragma once

#include "language.h"

namespace cuda {

// Room for variables in shared memory, after what a kernel asks for itself: the most that CUDA allows.
constexpr u32 VARIABLES_BYTES = 48 << 10, SHARED_ALIGNMENT = 1024;
inline u32 dynamic_bytes, variables_bytes;
inline std::vector<char*> stacks;

inline u8* dynamic_shared() { return own_block().shared; }

template <class T>
inline u32 place_variables() {
  u32 at = (variables_bytes + alignof(T) - 1) / alignof(T) * alignof(T);
  variables_bytes = at + sizeof(T);
  if (variables_bytes > VARIABLES_BYTES) fail("more variables in shared memory than there is room for");
  return at;
}
// A structure of variables in shared memory, at the same place in each block.
template <class T>
inline T& shared_variables() {
  static const u32 at = place_variables<T>();
  return *reinterpret_cast<T*>(own_block().shared + dynamic_bytes + at);
}

inline void run_thread() {
  launched.kernel(launched.arguments);
  end_thread();
  _longjmp(launched.scheduler, 1);
}

inline __attribute__((noinline)) void resume(Thread& thread) {
  launched.running = &thread;
  if (_setjmp(launched.scheduler)) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline void make_threads(Block& block, u32 threads) {
  for (u32 number = 0; number < threads; number++) {
    auto& all = launched.cluster.threads;
    if (stacks.size() == all.size()) stacks.push_back((char*)malloc(STACK_BYTES));
    Thread& thread = all.emplace_back();
    thread.block = &block;
    thread.number = number;
    getcontext(&thread.start);
    thread.start.uc_stack = {.ss_sp = stacks[all.size() - 1], .ss_flags = 0, .ss_size = STACK_BYTES};
    makecontext(&thread.start, run_thread, 0);
  }
}

inline void make_cluster(Dimensions first, u32 blocks, u32 threads) {
  u32 bytes = (dynamic_bytes + VARIABLES_BYTES + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
  launched.cluster = {};
  launched.cluster.blocks.resize(blocks);
  for (u32 rank = 0; rank < blocks; rank++) {
    Block& block = launched.cluster.blocks[rank];
    block.shared = (u8*)aligned_alloc(SHARED_ALIGNMENT, bytes);
    memset(block.shared, 0xFF, bytes);
    block.shared_bytes = bytes;
    block.rank = rank;
    block.index = {first.x + rank, first.y, first.z};
    block.warps.resize(threads / 32);
    block.warpgroups.resize((threads + 127) / 128);
    make_threads(block, threads);
  }
}

// Each warp's threads that need not wait run until they wait; some warps are passed over.
inline u32 run_warps() {
  auto& threads = launched.cluster.threads;
  u32 warps = threads.size() / 32, first = drawn() % warps, ended = 0;
  for (u32 i = 0; i < warps; i++) {
    u32 warp = (first + i) % warps;
    bool passed_over = drawn() % 8 == 0;
    for (u32 lane = 0; lane < 32; lane++) {
      Thread& thread = threads[warp * 32 + lane];
      ended += thread.ended;
      if (passed_over || thread.ended || (thread.watched && (*thread.watched & thread.mask) == thread.value)) continue;
      resume(thread);
    }
  }
  return ended;
}

// With slow copies none lands while threads can go on without it, and then one at a time.
inline void run_cluster() {
  bool slow_copies = drawn() % 2;
  u32 idle = 0;
  while (run_warps() < launched.cluster.threads.size()) {
    u64 before = launched.progress;
    if (!slow_copies || idle) land(idle > 8 ? Landing::ALL : slow_copies ? Landing::ONE : Landing::SOME);
    idle = launched.progress == before ? idle + 1 : 0;
    if (idle > PATIENCE) fail("threads wait for each other forever");
  }
  if (!transfers.empty() || !late_arrivals.empty()) fail("a block ends while copies are under way");
}

inline void clear() {
  transfers.clear();
  late_arrivals.clear();
  for (Block& block : launched.cluster.blocks) free(block.shared);
  launched.cluster = {};
}

// Returns why the launch failed, or an empty text.
inline const char* launch(void (*kernel)(const void*), const void* arguments, Dimensions grid, u32 cluster, u32 threads,
                          u32 shared, u32 seed) {
  launched.kernel = kernel;
  launched.arguments = arguments;
  launched.grid = grid;
  launched.seed = seed;
  launched.failure[0] = 0;
  dynamic_bytes = (shared + 127) / 128 * 128;
  if (!_setjmp(launched.failed)) {
    u32 rows = grid.y * grid.z, first = drawn() % rows;
    for (u32 i = 0; i < rows; i++)
      for (u32 x = 0, row = (first + i) % rows; x < grid.x; x += cluster) {
        make_cluster({x, row % grid.y, row / grid.y}, cluster, threads);
        run_cluster();
        clear();
      }
  }
  clear();
  return launched.failure;
}

}  // namespace cuda

// The function that launches a kernel: see launches.py. CLUSTER: what the source itself demands, or 1.
#define LAUNCHES(NAME, ARGUMENTS, CLUSTER)                                                                                       \
  extern "C" const char* launch_##NAME(const void* arguments, const unsigned* grid, unsigned cluster, unsigned threads,    \
                                       unsigned shared, unsigned seed) {                                                   \
    auto kernel = [](const void* given) {                                                                                  \
      ARGUMENTS own;                                                                                                       \
      memcpy((void*)&own, given, sizeof own);                                                                              \
      NAME(own);                                                                                                           \
    };                                                                                                                     \
    return cuda::launch(kernel, arguments, {grid[0], grid[1], grid[2]}, max(cluster, CLUSTER), threads, shared, seed);      \
  }
