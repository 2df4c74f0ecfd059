// Probabilities times latents, for 64 rows and 256 channels: the role of each of two warpgroups.

#pragma once

#include "bf16_products.cuh"

constexpr int VALUE_THREADS = 256, VALUE_WARPS = VALUE_THREADS / 32;

// Issues O += P V for two chunks, and does not wait.
__device__ __forceinline__ void accumulate(float (&out)[64], Shared& shared, const RingPosition& ring, int i, bool first) {
  u64 probabilities = descriptor<1>(shared_address(shared.probabilities[ring.count & 1]));
  u64 latents = value_descriptor(shared_address(shared.latents[ring.slot_of(i)]));
#pragma unroll
  for (int step = 0; step < BLOCK / 16; step++)
    multiply_values(out, probabilities + step * 2, latents + step * 128, !first || step > 0);
  wgmma_commit();
}

__device__ __forceinline__ void rescale(float (&out)[2][64], const float (&alpha)[2]) {
  if (__all_sync(~0u, alpha[0] == 1.0f && alpha[1] == 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    out[0][i] *= alpha[i / 2 % 2];
    out[1][i] *= alpha[i / 2 % 2];
  }
}

// Adds one block to this warpgroup's `half` of the channels: waits for the block's probabilities and for the products.
template <int CTAS>
__device__ __forceinline__ void add_block(float (&out)[2][64], Shared& shared, const RingPosition& ring, int half, int row, bool first) {
  int buffer = ring.count & 1;
  wait(&shared.probabilities_full[buffer], ring.count / 2 & 1);
  if (!first) rescale(out, {shared.alpha[buffer][row], shared.alpha[buffer][row + 8]});
  pin(out[0]);
  pin(out[1]);
  wgmma_fence();
  accumulate(out[0], shared, ring, half, first);
  accumulate(out[1], shared, ring, half + 2, first);
  wgmma_wait<1>();
  release<CTAS>(&shared.empty[ring.slot_of(half)]);
  wgmma_wait<0>();
  release<CTAS>(&shared.empty[ring.slot_of(half + 2)]);
  pin(out[0]);
  pin(out[1]);
}

__device__ __forceinline__ void release_probabilities(Shared& shared, const RingPosition& ring) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(&shared.probabilities_empty[ring.count & 1]);
}

// A 4 x 4 transpose among four neighbouring lanes.
__device__ __forceinline__ void exchange(u32 (&words)[4]) {
  bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    if (odd) words[i] = other; else words[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 other = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
    if (high) words[i] = other; else words[i + 2] = other;
  }
}

// Stores O divided by the sum as bf16, 16 bytes a thread: two rows a thread, 128 channels. Only the first `rows` rows exist.
__device__ __forceinline__ void store_values(const float (&out)[64], const float (&inverse)[2], u32* target, int row, int rows) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 words[4];
#pragma unroll
      for (int word = 0; word < 4; word++) {
        int at = (i * 4 + word) * 4 + half * 2;
        words[word] = pack_bf16(out[at] * inverse[half], out[at + 1] * inverse[half]);
      }
      exchange(words);
      uint4* to = reinterpret_cast<uint4*>(target + (row + half * 8) * (LATENT / 2)) + i * 4 + threadIdx.x % 4;
      if (row + half * 8 < rows) *to = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
