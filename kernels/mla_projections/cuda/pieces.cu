// Attended latents to values for one or two tokens, as in few_tokens.cu, where the pieces of split requests are not joined yet,
// for Hopper (sm_90a). A kernel that joins them would take as long to start and to end as this one. With more tokens such a
// kernel is faster, since more multiprocessors read the pieces.
//
// A CTA has one head, or a share of it. Its warps share the pieces of each token, 1 KB each, which are all in flight at once if there are few: a
// row of the result is the average of its pieces' values, weighted by the sum of each piece's weights.

#include "../../mla_decode/cuda/parts.cuh"
#include "expand.cuh"

// Tokens of the products' tile; pieces of a warp that are in flight at once; elements of a lane, of eight values each; threads
// whose values fill a cache line.
constexpr int TILE_TOKENS = 16, IN_FLIGHT = 7, STEPS = LATENT / (32 * VALUES), LINE_THREADS = 8;

struct PiecesArguments {
  // Those of the expansion, without attended latents.
  ExpandArguments expand;
  Work work;
};

struct PiecesShared {
  ExpandShared<TILE_TOKENS> expand;
  // Each warp's part of a token's average.
  float sums[WARPS][LATENT], largest[WARPS], totals[WARPS];
};

// Where the values of a token's pieces are, for one head, `stride` rows from each other.
struct Pieces {
  const uint4* values;
  // Null for a whole request.
  const float* log_sums;
  int stride, count;

  // Called by a whole warp. The schedule was written by a kernel that has ended; split requests come first in it.
  static __device__ __forceinline__ Pieces of(const Work& work, int token, int head) {
    int request = token / work.query_tokens, index = token % work.query_tokens, lane = threadIdx.x % 32;
    for (int first = 0; first < work.part_count; first += 32) {
      SplitRequest split = work.split_request(first + lane);
      bool used = split.last > split.first;
      u32 found = __ballot_sync(~0u, used && split.request == request), all = __ballot_sync(~0u, used);
      if (found) {
        int from = __ffs(found) - 1, slot = __shfl_sync(~0u, split.first, from), last = __shfl_sync(~0u, split.last, from);
        long long row = (long long)(slot * work.query_tokens + index) * work.heads + head;
        return {reinterpret_cast<const uint4*>(work.values) + row * (LATENT / VALUES), work.log_sums + row,
                work.query_tokens * work.heads, last - slot};
      }
      if (~all) break;
    }
    long long row = (long long)token * work.heads + head;
    return {reinterpret_cast<const uint4*>(work.out) + row * (LATENT / VALUES), nullptr, 0, 1};
  }

  __device__ __forceinline__ const uint4* at(int piece, int step) const {
    return values + (long long)piece * stride * (LATENT / VALUES) + step * 32 + threadIdx.x % 32;
  }
  __device__ __forceinline__ float log_sum(int piece) const { return log_sums ? log_sums[(long long)piece * stride] : 0.0f; }
};

// A warp's share of a token's pieces.
struct Average {
  float largest = LOWEST, total = 0.0f;
  Values sums[STEPS] = {};

  // Adds every `stride`-th piece from `first` on. alone: whether no other CTA reads them.
  __device__ __forceinline__ void add_all(const Pieces& pieces, int first, int stride, bool alone) {
#pragma unroll 1
    for (int piece = first; piece < pieces.count; piece += stride * IN_FLIGHT) add_some(pieces, piece, stride);
    __syncwarp();
    if (!alone || !pieces.log_sums || threadIdx.x % LINE_THREADS) return;
    for (int piece = first; piece < pieces.count; piece += stride)
#pragma unroll
      for (int step = 0; step < STEPS; step++) discard(pieces.at(piece, step));
  }

  __device__ __forceinline__ void add_some(const Pieces& pieces, int first, int stride) {
    uint4 found[IN_FLIGHT][STEPS];
    float log_sums[IN_FLIGHT], before = largest;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      int piece = first + i * stride;
      if (piece >= pieces.count) continue;
      log_sums[i] = pieces.log_sum(piece);
#pragma unroll
      for (int step = 0; step < STEPS; step++) found[i][step] = load(pieces.at(piece, step));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) largest = first + i * stride < pieces.count ? fmaxf(largest, log_sums[i]) : largest;
    scale(exp2_fast(before - largest));
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      if (first + i * stride >= pieces.count) continue;
      float weight = exp2_fast(log_sums[i] - largest);
      total += weight;
#pragma unroll
      for (int step = 0; step < STEPS; step++) sums[step].add(Values::of(found[i][step]), weight);
    }
  }

  __device__ __forceinline__ void scale(float factor) {
    total *= factor;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int i = 0; i < VALUES; i++) sums[step].value[i] *= factor;
  }
};

struct Join {
  PiecesShared& shared;
  const PiecesArguments& given;
  int head;

  // Writes the attended latents as the copy engine would have brought them. All threads call it; warps share the
  // tokens.
  __device__ __forceinline__ void join() const {
    int sharing = WARPS / given.expand.tokens, warp = threadIdx.x / 32;
    Pieces pieces = Pieces::of(given.work, warp / sharing, head);
    wait_for_earlier();
    leave(pieces, warp % sharing, sharing);
    __syncthreads();
    write(warp / sharing, warp % sharing, sharing);
  }

  __device__ __forceinline__ void leave(const Pieces& pieces, int part, int sharing) const {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Average average;
    average.add_all(pieces, part, sharing, given.expand.shares == 1);
    float4* to = reinterpret_cast<float4*>(shared.sums[warp]);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const float* sum = average.sums[step].value;
      to[(step * 32 + lane) * 2] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      to[(step * 32 + lane) * 2 + 1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    if (lane == 0) shared.largest[warp] = average.largest;
    if (lane == 0) shared.totals[warp] = average.total;
  }

  // Writes a warp's share of the channels, in pairs. 16-byte pieces of a line change places by the token's number.
  __device__ __forceinline__ void write(int token, int part, int sharing) const {
    int lane = threadIdx.x % 32, warps = threadIdx.x / 32 - part, pairs = LATENT / 2 / sharing;
    float largest = LOWEST, total = 0.0f;
    for (int i = 0; i < sharing; i++) largest = fmaxf(largest, shared.largest[warps + i]);
    for (int i = 0; i < sharing; i++) total += shared.totals[warps + i] * exp2_fast(shared.largest[warps + i] - largest);
    for (int pair = part * pairs + lane; pair < (part + 1) * pairs; pair += 32) {
      float2 sum = {};
      for (int i = 0; i < sharing; i++) {
        float2 found = reinterpret_cast<const float2*>(shared.sums[warps + i])[pair];
        float weight = exp2_fast(shared.largest[warps + i] - largest);
        sum.x = fmaf(found.x, weight, sum.x);
        sum.y = fmaf(found.y, weight, sum.y);
      }
      int chunk = pair / (ELEMENTS / 2), at = pair % (ELEMENTS / 2);
      u8* line = shared.expand.attended[chunk] + token * LINE;
      reinterpret_cast<u32*>(line)[(at / 4 ^ token % 8) * 4 + at % 4] = pack_bf16(sum.x / total, sum.y / total);
    }
  }
};

extern "C" __device__ int expand_pieces_shared_bytes = sizeof(PiecesShared);
extern "C" __global__ void __launch_bounds__(THREADS, 1) expand_pieces(const __grid_constant__ PiecesArguments given) {
  extern __shared__ __align__(1024) u8 memory[];
  PiecesShared& shared = *reinterpret_cast<PiecesShared*>(memory);
  start_next();
  Expand<TILE_TOKENS> work{shared.expand, given.expand, (int)blockIdx.x, 0};
  if (threadIdx.x == 0) work.copy_weight();
  __syncthreads();
  Join{shared, given, work.head()}.join();
  fence_async_proxy();
  __syncthreads();
  float sum[TILE_TOKENS / 2];
  work.multiply_chunks<false>(sum);
  work.store(sum);
}
