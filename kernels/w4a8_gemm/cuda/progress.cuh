// How a tile of the last product learns that the first one's warps, on all multiprocessors, have stored the rows that it reads.
//
// A counter for each tile of rows, zero before the kernel: warps that have stored their part add to it, then tiles that have
// seen all of these. The last of the latter makes it zero again, for the next kernel. CTAs draw tiles in order, those of
// the first product before the others, and the former wait for nothing, so that every tile's turn comes.

#pragma once

#include "../../cuda/hopper.cuh"

// Generic stores and the copy engine's loads go by different ways: both sides order them.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Counts that this warp has stored its part, which threads may then load, and so may the copy engine.
__device__ __forceinline__ void count_stored(int* counter) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void tell_stored(int* counter) {
  fence_async_global();
  count_stored(counter);
}

// How many warps have stored their part. One thread that sees all of them may load the rows.
__device__ __forceinline__ int count_of(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// One thread waits for `stores` warps. It may copy the rows afterwards.
__device__ __forceinline__ void wait_for_stores(const int* counter, int stores) {
  while (count_of(counter) < stores) {}
  fence_async_global();
}

// Called by one thread of each of `reads` tiles, after its wait and after it has issued its copies, which would
// otherwise wait for the answer.
__device__ __forceinline__ void tell_seen(int* counter, int stores, int reads) {
  if (atomicAdd(counter, 1) == stores + reads - 1) *counter = 0;
}
