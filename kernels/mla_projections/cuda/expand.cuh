// Takes attended latents of one head out of the latent's space: to values, quantized or in bf16. A head's values are one
// quantization group, or several: then a CTA computes one of these, and is said to have a share of the head.

#pragma once

#include "../../cuda/bf16_products.cuh"
#include "../../cuda/values.cuh"
#include "../../mla_decode/cuda/parts.cuh"

// A head's weight lies in boxes of 128 rows of 128 bytes (64 elements), swizzled.
constexpr int ELEMENTS = 64, LINE = 128, WEIGHT_BYTES = GROUP * LINE;
constexpr int THREADS = 256, WARPS = THREADS / 32;

struct ExpandArguments {
  // A box is GROUP rows of the weight, or the kernel's number of tokens of the attended latents.
  TensorMap weight, attended;
  // [tokens, heads * shares, GROUP] in bf16, four values an element; null if they are quantized.
  uint2* plain;
  u8* values;
  float* scales;
  int tokens, heads, shares, head_rows, scale_stride;
};

constexpr int CHUNKS = LATENT / ELEMENTS;

// With 128 tokens there is no room for the last chunk until the first one has been multiplied.
template <int TOKENS>
struct ExpandShared {
  static constexpr int SLOTS = TOKENS > 96 ? CHUNKS - 1 : CHUNKS;
  u8 weight[SLOTS][WEIGHT_BYTES];
  u8 attended[SLOTS][TOKENS * LINE];
  u64 weight_full[CHUNKS], attended_full[CHUNKS];
};

// A CTA computes one group of a head's values.
template <int TOKENS>
struct Expand {
  // Floats of a token's row of values, padded so that a thread's stores go to different banks.
  static constexpr int ROW = GROUP + 4, COUNT = TOKENS / WARPS, SLOTS = ExpandShared<TOKENS>::SLOTS;
  static_assert(TOKENS * ROW * 4 <= SLOTS * WEIGHT_BYTES, "the values fit where the weight was");
  ExpandShared<TOKENS>& shared;
  const ExpandArguments& given;
  // The group among those of all heads, and the first token.
  int group, first;

  __device__ __forceinline__ int head() const { return group / given.shares; }
  __device__ __forceinline__ int groups() const { return given.heads * given.shares; }

  __device__ __forceinline__ void copy_weight() const {
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      init_barrier(&shared.weight_full[chunk], 1);
      init_barrier(&shared.attended_full[chunk], 1);
    }
    fence_async_proxy();
    for (int chunk = 0; chunk < SLOTS; chunk++) copy_weight(chunk);
    prefetch_map(given.attended);
  }

  __device__ __forceinline__ void copy_attended() const {
    for (int chunk = 0; chunk < SLOTS; chunk++) copy_attended(chunk);
  }

  __device__ __forceinline__ void copy_weight(int chunk) const {
    int row = head() * given.head_rows + group % given.shares * GROUP;
    arrive_and_expect(&shared.weight_full[chunk], WEIGHT_BYTES);
    copy_box(shared.weight[chunk % SLOTS], given.weight, chunk * LINE, row, &shared.weight_full[chunk]);
  }

  __device__ __forceinline__ void copy_attended(int chunk) const {
    arrive_and_expect(&shared.attended_full[chunk], TOKENS * LINE);
    copy_box(shared.attended[chunk % SLOTS], given.attended, (head() * CHUNKS + chunk) * LINE, first, &shared.attended_full[chunk]);
  }

  // Copies the chunks for which there was no room, once all warps' products of the first ones are complete.
  __device__ __forceinline__ void copy_rest() const {
    wgmma_wait<1>();
    __syncthreads();
    if (threadIdx.x == 0)
      for (int chunk = SLOTS; chunk < CHUNKS; chunk++) {
        copy_weight(chunk);
        copy_attended(chunk);
      }
    __syncwarp();
  }

  // COPIED: whether the attended latents come by `copy_attended`; if not, they are there.
  template <bool COPIED>
  __device__ __forceinline__ void multiply_chunks(float (&sum)[TOKENS / 2]) const {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      u32 weight = shared_address(shared.weight[chunk % SLOTS]) + threadIdx.x / 128 * (WEIGHT_BYTES / 2);
      u32 attended = shared_address(shared.attended[chunk % SLOTS]);
      wait(&shared.weight_full[chunk], 0);
      if (COPIED) wait(&shared.attended_full[chunk], 0);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < ELEMENTS / 16; step++)
        multiply_step(sum, descriptor<1>(weight + step * 32), descriptor<1>(attended + step * 32), chunk + step > 0);
      wgmma_commit();
      if (SLOTS < CHUNKS && chunk == CHUNKS - SLOTS) copy_rest();
    }
    wgmma_wait<0>();
    pin(sum);
  }

  // Stores through shared memory, where a token's values become contiguous, a warp a token.
  __device__ __forceinline__ void store(const float (&sum)[TOKENS / 2]) const {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, left = given.tokens - first - warp * COUNT;
    float* rows = reinterpret_cast<float*>(shared.weight);
    float* own = rows + lane % 4 * 2 * ROW + warp * 16 + lane / 4;
    // Wait until all warps have read the weight.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) own[(i / 4 * 8 + i % 2) * ROW + i / 2 % 2 * 8] = sum[i];
    __syncthreads();
    float4 x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = *reinterpret_cast<const float4*>(rows + (warp * COUNT + i) * ROW + lane * 4);
    if (!given.plain) return quantize(x, left);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (i < left)
        given.plain[((long long)(first + warp * COUNT + i) * groups() + group) * (GROUP / 4) + lane] =
            make_uint2(pack_bf16(x[i].x, x[i].y), pack_bf16(x[i].z, x[i].w));
  }

  // Each lane does the divisions of one of the warp's tokens, of which `left` are there.
  __device__ __forceinline__ void quantize(const float4 (&x)[COUNT], int left) const {
    int token = first + threadIdx.x / 32 * COUNT, lane = threadIdx.x % 32;
    float own_largest = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      float largest = fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
      // The bits of positive numbers compare as the numbers do.
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      if (lane == i) own_largest = largest;
    }
    float scale = scale_of_group(own_largest), inverse = 1.0f / scale;
    if (lane < min(left, COUNT)) given.scales[(long long)group * given.scale_stride + token + lane] = scale;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      float factor = __shfl_sync(~0u, inverse, i);
      u32 packed = pack_e4m3(x[i].x * factor, x[i].y * factor) | pack_e4m3(x[i].z * factor, x[i].w * factor) << 16;
      if (i < left)
        reinterpret_cast<u32*>(given.values + ((long long)(token + i) * groups() + group) * GROUP)[lane] = packed;
    }
  }
};
