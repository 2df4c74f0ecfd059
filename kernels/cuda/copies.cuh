// More asynchronous copies into shared memory, besides `copy_box` (hopper.cuh); a barrier there counts the bytes. In PTX.

#pragma once

#include "hopper.cuh"

// Copies contiguous bytes by the copy engine. Addresses and length are multiples of 16.
__device__ __forceinline__ void copy_run(void* target, const void* source, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Copies a box that is not read again: the second-level cache evicts it first.
__device__ __forceinline__ void copy_box_once(void* target, const TensorMap& map, int column, int row, u64* barrier) {
  asm volatile(
      "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      " cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], policy;\n}"
      ::"r"(shared_address(target)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}
