// Barriers and copies between the CTAs of a cluster, which can reach each other's shared memory, in PTX.

#pragma once

#include "hopper.cuh"

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Makes no earlier writes visible to others, and so does not wait for writes to global memory.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// All threads of the cluster meet; each then sees what the others wrote to their barriers.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at this barrier in the cluster's CTA `rank`, which may be the caller's own.
__device__ __forceinline__ void arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{\n .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Stores to the same place in the shared memory of the cluster's CTA `rank`, whose own barrier counts the bytes.
__device__ __forceinline__ void send(float* place, float value, u64* barrier, u32 rank) {
  asm volatile(
      "{\n .reg .u32 there, counting;\n mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counting, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counting];\n}"
      ::"r"(shared_address(place)), "r"(shared_address(barrier)), "r"(rank), "r"(__float_as_uint(value)) : "memory");
}
__device__ __forceinline__ void send(float4* place, float4 value, u64* barrier, u32 rank) {
  asm volatile(
      "{\n .reg .u32 there, counting;\n mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 counting, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counting];\n}"
      ::"r"(shared_address(place)), "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// Copies a box to the same place in the shared memory of all CTAs in `mask`, whose own barriers count the bytes.
template <int CTAS>
__device__ __forceinline__ void copy_box_to(u8* target, const TensorMap& map, int column, int row, u64* barrier, u32 mask) {
  if (CTAS == 1) {
    copy_box(target, map, column, row, barrier);
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(shared_address(target)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"((unsigned short)mask) : "memory");
}
