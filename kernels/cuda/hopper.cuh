// Hopper's instructions by name, in PTX.

#pragma once

// Operands of a product's sums in PTX: NAMES_n lists %0 to %(n-1), BIND_n binds n elements of an array from `at` on.
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_20 NAMES_16 ", %16, %17, %18, %19"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_28 NAMES_24 ", %24, %25, %26, %27"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_128 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define BIND_4(d, at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])
#define BIND_8(d, at) BIND_4(d, at), BIND_4(d, at + 4)
#define BIND_12(d, at) BIND_8(d, at), BIND_4(d, at + 8)
#define BIND_16(d, at) BIND_8(d, at), BIND_8(d, at + 8)
#define BIND_20(d, at) BIND_16(d, at), BIND_4(d, at + 16)
#define BIND_24(d, at) BIND_16(d, at), BIND_8(d, at + 16)
#define BIND_28(d, at) BIND_16(d, at), BIND_12(d, at + 16)
#define BIND_32(d, at) BIND_16(d, at), BIND_16(d, at + 16)
#define BIND_40(d, at) BIND_32(d, at), BIND_8(d, at + 32)
#define BIND_48(d, at) BIND_32(d, at), BIND_16(d, at + 32)
#define BIND_56(d, at) BIND_32(d, at), BIND_24(d, at + 32)
#define BIND_64(d, at) BIND_32(d, at), BIND_32(d, at + 32)
#define BIND_72(d, at) BIND_64(d, at), BIND_8(d, at + 64)
#define BIND_80(d, at) BIND_64(d, at), BIND_16(d, at + 64)
#define BIND_88(d, at) BIND_64(d, at), BIND_24(d, at + 64)
#define BIND_96(d, at) BIND_64(d, at), BIND_32(d, at + 64)
#define BIND_104(d, at) BIND_64(d, at), BIND_40(d, at + 64)
#define BIND_112(d, at) BIND_64(d, at), BIND_48(d, at + 64)
#define BIND_120(d, at) BIND_64(d, at), BIND_56(d, at + 64)
#define BIND_128(d, at) BIND_64(d, at), BIND_64(d, at + 64)

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra finished;\n bra again;\n finished:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// A place in a ring of stages.
template <int STAGES>
struct Turn {
  int stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void copy_box(void* target, const TensorMap& map, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(shared_address(target)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// Programmatic dependent launch. `start_next`: the next kernel may start. `wait_for_earlier`: waits until the previous kernel
// has ended and what it wrote can be read.
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// The compiler neither reads nor moves these registers across this line: products in flight may still write them.
template <int N>
__device__ __forceinline__ void pin(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// Descriptor of a K-major operand: 128-byte rows (SWIZZLE 1) or 64-byte rows (SWIZZLE 2), groups of 8 rows one after another.
template <int SWIZZLE>
__device__ __forceinline__ u64 descriptor(u32 address) {
  constexpr u64 group_bytes = SWIZZLE == 1 ? 1024 : 512;
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((group_bytes >> 4) << 32) | ((u64)SWIZZLE << 62);
}

__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES_32 "}, %32, %33, p, 1, 1;\n}"
      : BIND_32(d, 0) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
      : BIND_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The largest e4m3 number, and the smallest magnitude that the scale of a group stands for.
constexpr float LARGEST_E4M3 = 448.0f, SMALLEST_MAGNITUDE = 1e-10f;

// The least power of two that is not smaller than a positive number.
__device__ __forceinline__ float least_power(float x) {
  u32 bits = __float_as_uint(x);
  return __uint_as_float(((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23);
}

// The scale of a group of activations: a power of two if the source is compiled so (act_quant/quantized.py).
__device__ __forceinline__ float scale_of_group(float largest) {
  float scale = fmaxf(largest, SMALLEST_MAGNITUDE) / LARGEST_E4M3;
#ifdef POWER_SCALES
  return least_power(scale);
#else
  return scale;
#endif
}

__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
  unsigned short packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Stores two 8 x 8 fragments transposed, so that a product's rows become contiguous.
__device__ __forceinline__ void store_transposed(u32 address, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(address), "r"(first), "r"(second) : "memory");
}

// The number of registers of a warpgroup's threads: give some up for good, or take those that another warpgroup has given up.
template <int COUNT>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Copies contiguous bytes by the copy engine. Addresses and length are multiples of 16.
__device__ __forceinline__ void copy_run(void* target, const void* source, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Brings contiguous bytes into the second-level cache. Address and length are multiples of 16.
__device__ __forceinline__ void prefetch_run(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Copies a box that is not read again: the second-level cache evicts it first.
__device__ __forceinline__ void copy_box_once(void* target, const TensorMap& map, int column, int row, u64* barrier) {
  asm volatile(
      "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      " cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], policy;\n}"
      ::"r"(shared_address(target)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// 16-byte accesses that the compiler keeps in program order, and stores of a product's sums through shared memory.
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
