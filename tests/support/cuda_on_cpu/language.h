// What CUDA C++ has beyond C++: built-in variables, vectors, and functions of a warp, a block, numbers and atomics.

#pragma once

#include <type_traits>

#include "instructions.h"

// As in CUDA, of numbers of two types too.
template <class X, class Y> constexpr std::common_type_t<X, Y> min(X x, Y y) {
  return std::min<std::common_type_t<X, Y>>(x, y);
}
template <class X, class Y> constexpr std::common_type_t<X, Y> max(X x, Y y) {
  return std::max<std::common_type_t<X, Y>>(x, y);
}

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (cuda::Dimensions{cuda::own().number, 0, 0})
#define blockDim (cuda::Dimensions{(cuda::u32)cuda::own_block().warps.size() * 32, 1, 1})
#define blockIdx (cuda::own_block().index)
#define gridDim (cuda::launched.grid)

inline void __syncthreads() { ptx::bar_sync(0, blockDim.x); }
inline void __syncwarp() { cuda::exchange(0); }

template <class T> inline T from_lane(T value, unsigned lane) {
  return cuda::bits<T>(cuda::exchange(cuda::bits<cuda::u64>(value))[lane % 32][0]);
}
template <class T> inline T __shfl_sync(unsigned, T value, int lane) { return from_lane(value, lane); }
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask) { return from_lane(value, cuda::own_lane() ^ mask); }
template <class T> inline T __shfl_up_sync(unsigned, T value, unsigned by) {
  unsigned lane = cuda::own_lane();
  return from_lane(value, lane < by ? lane : lane - by);
}
template <class T> inline T __shfl_down_sync(unsigned, T value, unsigned by) {
  unsigned lane = cuda::own_lane();
  return from_lane(value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  auto& votes = cuda::exchange(vote);
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= (unsigned)votes[lane][0] << lane;
  return all;
}
inline bool __any_sync(unsigned, bool vote) { return __ballot_sync(~0u, vote); }
inline bool __all_sync(unsigned, bool vote) { return !__ballot_sync(~0u, !vote); }
template <class T> inline unsigned __match_any_sync(unsigned, T value) {
  auto& values = cuda::exchange(cuda::bits<cuda::u64>(value));
  unsigned same = 0;
  for (int lane = 0; lane < 32; lane++) same |= (unsigned)(values[lane][0] == cuda::bits<cuda::u64>(value)) << lane;
  return same;
}
template <class T> inline T __reduce_add_sync(unsigned, T value) {
  auto& values = cuda::exchange(cuda::bits<cuda::u64>(value));
  T sum = 0;
  for (auto& each : values) sum += cuda::bits<T>(each[0]);
  return sum;
}
template <class T> inline T __reduce_max_sync(unsigned, T value) {
  auto& values = cuda::exchange(cuda::bits<cuda::u64>(value));
  for (auto& each : values) value = max(value, cuda::bits<T>(each[0]));
  return value;
}
template <class T> inline T __reduce_min_sync(unsigned, T value) {
  auto& values = cuda::exchange(cuda::bits<cuda::u64>(value));
  for (auto& each : values) value = min(value, cuda::bits<T>(each[0]));
  return value;
}

template <class T> inline T atomicAdd(T* at, T value) { T before = *at; *at += value; return before; }
template <class T> inline T atomicMin(T* at, T value) { T before = *at; *at = min(before, value); return before; }
template <class T> inline T atomicMax(T* at, T value) { T before = *at; *at = max(before, value); return before; }
template <class T> inline T atomicOr(T* at, T value) { T before = *at; *at |= value; return before; }

template <class T> inline T __ldg(const T* at) { return *at; }
template <class T> inline T __ldcs(const T* at) { return *at; }
template <class T> inline T __ldcg(const T* at) { return *at; }

inline float __uint_as_float(unsigned word) { return cuda::bits<float>(word); }
inline float __int_as_float(int word) { return cuda::bits<float>(word); }
inline unsigned __float_as_uint(float value) { return cuda::bits<unsigned>(value); }
inline int __float_as_int(float value) { return cuda::bits<int>(value); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selected) {
  cuda::u64 bytes = (cuda::u64)y << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= (unsigned)(bytes >> (selected >> 4 * i & 7) * 8 & 255) << 8 * i;
  return chosen;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return ((cuda::u64)high << 32 | low) >> (by & 31);
}

inline cuda::u64 __cvta_generic_to_shared(const void* at) { return (const cuda::u8*)at - cuda::own_block().shared; }
