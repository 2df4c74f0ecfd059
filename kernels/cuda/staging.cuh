// 16-byte accesses that the compiler keeps in program order, and stores of a product's sums through shared memory. In PTX.

#pragma once

#include "hopper.cuh"

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 found;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(address));
  return found;
}
__device__ __forceinline__ uint4 load_shared(const void* from) { return load_shared(shared_address(from)); }

__device__ __forceinline__ uint2 load_shared_pair(u32 address) {
  uint2 found;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(address));
  return found;
}

__device__ __forceinline__ void store_global(void* to, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(first), "r"(second), "r"(third), "r"(fourth) : "memory");
}
