// Before and after the attending kernel: how the work is cut, once a step, and the joining of what was cut.

#include "parts.cuh"

// Units that a piece costs beside its own, about; and that a cut costs: pieces to write and to join.
constexpr int PIECE_COST = 1, CUT_COST = 4;
constexpr int WARPS = 8, THREADS = 32 * WARPS;

__device__ __forceinline__ int units_of(const Work& work, int request) {
  return (work.lengths[request] + work.unit_tokens - 1) / work.unit_tokens;
}

// One warp: where each request's cost begins, all laid end to end. Returns their sum.
__device__ __forceinline__ int lay_out(const Work& work) {
  int lane = threadIdx.x, before = 0;
  for (int base = 0; base < work.requests; base += 32) {
    int request = base + lane, cost = request < work.requests ? units_of(work, request) + PIECE_COST : 0, sum = cost;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (request < work.requests) work.starts[request] = before + sum - cost;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) work.starts[work.requests] = before;
  return before;
}

// The first unit of a request at or behind a position among the costs.
__device__ __forceinline__ int unit_at(const Work& work, int request, int position) {
  return max(position - work.starts[request] - PIECE_COST, 0);
}

// One warp: whether parts of this cost cut any request.
__device__ __forceinline__ bool cuts(const Work& work, int capacity) {
  bool any = false;
  for (int request = threadIdx.x % 32; request < work.requests; request += 32) {
    int first = (work.starts[request] + PIECE_COST) / capacity, last = (work.starts[request + 1] - 1) / capacity;
    any |= first != last;
  }
  return __any_sync(~0u, any);
}

__device__ __forceinline__ int request_at(const Work& work, int position) {
  int low = 0, high = work.requests - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (work.starts[middle] <= position) low = middle; else high = middle - 1;
  }
  return low;
}

// One CTA. All parts have the same cost: the smallest that suffices, or one a little larger that cuts nothing.
extern "C" __global__ void __launch_bounds__(THREADS) schedule(const __grid_constant__ Work work) {
  __shared__ int total, best;
  if (threadIdx.x < 32) {
    int sum = lay_out(work);
    if (threadIdx.x == 0) {
      total = sum;
      best = 1 << 30;
    }
  }
  __syncthreads();
  int least = max((total + work.part_count - 1) / work.part_count, PIECE_COST + 1), tried = threadIdx.x / 32;
  int rated = tried + (cuts(work, least + tried) ? CUT_COST : 0);
  // The lower bits tell which it was.
  atomicMin(&best, rated * WARPS + tried);
  __syncthreads();
  int capacity = least + best % WARPS;
  for (int part = threadIdx.x; part <= work.part_count; part += THREADS) {
    int position = part * capacity;
    bool some = position < total;
    int request = some ? request_at(work, position) : work.requests;
    work.parts[part] = make_int2(request, some ? unit_at(work, request, position) : 0);
  }
  for (int request = threadIdx.x; request < work.requests; request += THREADS) {
    int first = (work.starts[request] + PIECE_COST) / capacity, last = (work.starts[request + 1] - 1) / capacity;
    work.borders[request] = make_int2(first, last);
  }
}

// Joins the pieces of requests that a border cuts. A warp does one head; reads and writes 2 bytes a value.
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Work work) {
  int token = blockIdx.x, request = token / work.query_tokens, lane = threadIdx.x % 32;
  int head = blockIdx.y * 8 + threadIdx.x / 32;
  start_next();
  wait_for_earlier();
  int2 border = work.borders[request];
  if (border.x == border.y || head >= work.heads) return;
  float largest = LOWEST, total = 0.0f, sum[16] = {};
#pragma unroll 2
  for (int part = border.x; part <= border.y; part++) {
    long long slot = ((long long)(part + request) * work.query_tokens + token % work.query_tokens) * work.heads + head;
    float log_sum = work.log_sums[slot], now = fmaxf(largest, log_sum);
    const uint4* values = reinterpret_cast<const uint4*>(work.pieces + slot * (LATENT / 2));
    uint4 packed[2] = {values[lane], values[32 + lane]};
    float alpha = exp2_fast(largest - now), weight = exp2_fast(log_sum - now);
    largest = now;
    total = total * alpha + weight;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
      for (int word = 0; word < 4; word++) {
        int at = i * 8 + word * 2;
        sum[at] = sum[at] * alpha + weight * __uint_as_float(words[word] << 16);
        sum[at + 1] = sum[at + 1] * alpha + weight * __uint_as_float(words[word] & 0xFFFF0000u);
      }
    }
  }
  uint4* target = reinterpret_cast<uint4*>(work.out + ((long long)token * work.heads + head) * (LATENT / 2));
  float inverse = 1.0f / total;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 packed;
    packed.x = pack_bf16(sum[i * 8] * inverse, sum[i * 8 + 1] * inverse);
    packed.y = pack_bf16(sum[i * 8 + 2] * inverse, sum[i * 8 + 3] * inverse);
    packed.z = pack_bf16(sum[i * 8 + 4] * inverse, sum[i * 8 + 5] * inverse);
    packed.w = pack_bf16(sum[i * 8 + 6] * inverse, sum[i * 8 + 7] * inverse);
    target[i * 32 + lane] = packed;
  }
}
