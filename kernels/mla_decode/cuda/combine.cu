// Combines the pieces of split requests after the attention kernel. A row of the result is the average of its pieces' values,
// weighted by the sum of each piece's weights.
//
// A warp computes 256 of a row's channels, for several rows at once: the loads of their first pieces are in flight together.
// Which rows these are is known before the attention kernel has ended. A CTA without rows exits at once, so that the next
// kernel's CTAs find room; only the first CTA waits for the attention kernel in any case. Reads and writes 2 bytes a value.

#include "../../cuda/values.cuh"
#include "parts.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
// Rows of a warp and their pieces that are in flight at once; warps that share a row; threads whose values fill a cache line.
constexpr int ROWS = 4, PIECES = 3, SHARES = LATENT / (32 * VALUES), LINE_THREADS = 8;

// A warp's share of a row. Its pieces lie `stride` rows apart from `slot` on; `at` is where the thread's values are in a row.
struct Share {
  int slot, stride, row, pieces, at;

  __device__ __forceinline__ long long slot_of(int piece) const { return slot + piece * stride; }
  __device__ __forceinline__ const uint4* values(const Work& work, int piece) const {
    return reinterpret_cast<const uint4*>(work.values) + slot_of(piece) * (LATENT / VALUES) + at;
  }
};

__device__ __forceinline__ void find(Share (&shares)[ROWS], const Work& work, int first) {
  int stride = work.query_tokens * work.heads;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    int item = first + i * WARPS * gridDim.x, row = item / SHARES % stride, index = item / SHARES / stride;
    SplitRequest split = work.split_request(index);
    shares[i] = {split.first * stride + row, stride, split.request * stride + row, split.last - split.first,
                 item % SHARES * 32 + (int)threadIdx.x % 32};
  }
}

struct Found {
  uint4 values[PIECES];
  float log_sums[PIECES];

  __device__ __forceinline__ void load_from(const Work& work, const Share& share, int first) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (first + i >= share.pieces) continue;
      log_sums[i] = work.log_sums[share.slot_of(first + i)];
      values[i] = load(share.values(work, first + i));
    }
  }
};

struct Average {
  float largest = LOWEST, total = 0.0f;
  Values sum = {};

  __device__ __forceinline__ void add(const Found& found, int count) {
    float before = largest;
#pragma unroll
    for (int i = 0; i < PIECES; i++) largest = i < count ? fmaxf(largest, found.log_sums[i]) : largest;
    scale(exp2_fast(before - largest));
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i >= count) continue;
      float weight = exp2_fast(found.log_sums[i] - largest);
      total += weight;
      sum.add(Values::of(found.values[i]), weight);
    }
  }
  __device__ __forceinline__ void scale(float factor) {
    total *= factor;
#pragma unroll
    for (int i = 0; i < VALUES; i++) sum.value[i] *= factor;
  }
  __device__ __forceinline__ uint4 packed() {
    scale(1.0f / total);
    return sum.packed();
  }
};

__device__ __forceinline__ void combine_shares(const Work& work, const Share (&shares)[ROWS]) {
  Found found[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) found[i].load_from(work, shares[i], 0);
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const Share& share = shares[i];
    if (!share.pieces) continue;
    Average average;
    average.add(found[i], share.pieces);
#pragma unroll 1
    for (int first = PIECES; first < share.pieces; first += PIECES) {
      found[i].load_from(work, share, first);
      average.add(found[i], share.pieces - first);
    }
    __syncwarp();
    if (threadIdx.x % LINE_THREADS == 0)
      for (int piece = 0; piece < share.pieces; piece++) discard(share.values(work, piece));
    reinterpret_cast<uint4*>(work.out)[(long long)share.row * (LATENT / VALUES) + share.at] = average.packed();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) combine(const __grid_constant__ Work work) {
  start_next();
  int first = blockIdx.x * WARPS + threadIdx.x / 32;
  Share shares[ROWS];
  // The schedule was written by a kernel that has ended. Split requests come first in it.
  find(shares, work, first);
  if (blockIdx.x > 0 && !shares[0].pieces) return;
  wait_for_earlier();
  while (shares[0].pieces) {
    combine_shares(work, shares);
    find(shares, work, first += ROWS * WARPS * gridDim.x);
  }
}
