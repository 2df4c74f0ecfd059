// Finds and copies the latents that a query attends to: part of the producers' role. Needs `parts.cuh`.

#pragma once

// Bytes that one instruction of a thread copies.
constexpr int COPIED = 16;

struct Selection {
  // [queries, count]: positions in a query's row, ascending, as many as `Work` has lengths of; those are a row of `Work` each.
  const int* tokens;
  // The rows' blocks in the pool. A row has `query_tokens` queries.
  const int* block_table;
  int count, table_stride, query_tokens;
};

__device__ __forceinline__ int load_int(const int* from) {
  int found;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
  return found;
}

__device__ __forceinline__ void copy_piece(u32 target, const u8* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Arrives once all that this thread has copied so far is there.
__device__ __forceinline__ void arrive_when_copied(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Before a thread ends: waits for all that it has copied.
__device__ __forceinline__ void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where the latents of a block's 64 selected tokens lie in the pool. A lane knows those of tokens `lane` and `lane + 32`. The
// look-ups of the next two blocks are under way while a block is copied. Tokens after the last selected one stand for it: their
// probabilities are zero.
template <int ROW_BYTES>
struct Places {
  const int *tokens, *blocks;
  int last, first;
  // Positions of the next block but one; places of the next block in the pool, in units of 16 bytes.
  int position[2];
  u32 next[2];

  __device__ __forceinline__ Places(const Selection& selection, int query, int selected, int first_block)
      : tokens(selection.tokens + (long long)query * selection.count),
        blocks(selection.block_table + (long long)(query / selection.query_tokens) * selection.table_stride),
        last(selected - 1), first(first_block * BLOCK) {
    load_positions();
    look_up();
    load_positions();
  }
  __device__ __forceinline__ void load_positions() {
#pragma unroll
    for (int half = 0; half < 2; half++) position[half] = load_int(tokens + min(first + half * 32 + (int)threadIdx.x % 32, last));
    first += BLOCK;
  }
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int half = 0; half < 2; half++)
      next[half] = (load_int(blocks + position[half] / BLOCK) * BLOCK + position[half] % BLOCK) * (ROW_BYTES / COPIED);
  }
  // Sets `place` to where the latents of the next block lie.
  __device__ __forceinline__ void take(u32 (&place)[2]) {
    place[0] = next[0];
    place[1] = next[1];
    look_up();
    load_positions();
  }
  // Two of the warps: prefetches the next block into the second-level cache.
  __device__ __forceinline__ void prefetch_next(const u8* pool) const {
    int half = threadIdx.x / 32 % 4;
    if (half < 2) prefetch_run(pool + (u64)(half ? next[1] : next[0]) * COPIED, ROW_BYTES);
  }
};
