// Asynchronous copies into shared memory that a barrier there counts, besides those of boxes (hopper.cuh), in PTX.

#pragma once

#include "hopper.cuh"

// Bytes next to each other, by the copy engine: addresses and length are multiples of 16.
__device__ __forceinline__ void copy_run(void* target, const void* source, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
