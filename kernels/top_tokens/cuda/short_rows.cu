// The positions of a query's highest scores, exactly, by radix selection in one CTA whose threads hold all scores (sm_90).
//
// As `choice.cu`, for queries that see up to 16 scores a thread: these stay in registers, and no CTA waits for another. So a choice
// takes one read of memory, three histograms and one count. Queries that see more are left to another kernel.

#include "ordered.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

struct Shared {
  // By pass.
  alignas(16) int bins[PASSES][BINS];
  int warp_sums[WARPS];
  Counts warps[WARPS];
  // The bin of the least chosen score, how many are in it, and how many of those are chosen.
  int bin, inside, wanted;
};

// All threads: finds the bin of the least chosen score among those of the pass, and how many of that bin are chosen.
__device__ __forceinline__ void find_bin(Shared& shared, int pass, int wanted) {
  static_assert(BINS == 4 * THREADS, "a thread has four bins");
  // The first thread has the highest bins.
  int lowest = BINS - 4 * (threadIdx.x + 1);
  int4 found = *reinterpret_cast<const int4*>(&shared.bins[pass][lowest]);
  int own = (found.x + found.y) + (found.z + found.w), above = sum_before(shared.warp_sums, own);
  if (above < wanted && above + own >= wanted) {
    int bin = lowest + 3, inside = found.w;
    if (above + found.w < wanted) above += found.w, inside = found.z, bin--;
    if (bin == lowest + 2 && above + found.z < wanted) above += found.z, inside = found.y, bin--;
    if (bin == lowest + 1 && above + found.y < wanted) above += found.y, inside = found.x, bin--;
    shared.bin = bin;
    shared.inside = inside;
    shared.wanted = wanted - above;
  }
  __syncthreads();
}

// OWN: scores of a thread. A warp has a part of the row, a round of 32 scores after another.
template <int OWN>
__device__ __forceinline__ void choose_held(Shared& shared, const Arguments& given) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < PASSES * BINS / 4; i += THREADS) reinterpret_cast<uint4*>(shared.bins)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  // It belongs to the step's plan, which is complete before the step's first kernel of ours begins.
  int tokens = given.seen[blockIdx.x];
  int rounds = (tokens + THREADS - 1) / THREADS, first = warp * rounds * 32 + lane;
  const float* scores = given.scores + (long long)blockIdx.x * given.width;
  int* out = given.out + (long long)blockIdx.x * given.count;
  wait_for_earlier();
  start_next();
  if (tokens > OWN * THREADS) return;
  u32 keys[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) keys[i] = i < rounds && first + 32 * i < tokens ? ordered(scores[first + 32 * i]) : 0;
  if (tokens <= given.count) {
    for (int i = threadIdx.x; i < given.count; i += THREADS) out[i] = i < tokens ? i : NO_TOKEN;
    return;
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (keys[i]) atomicAdd(&shared.bins[0][keys[i] >> 21], 1);
  }
  __syncthreads();
  find_bin(shared, 0, given.count);
  u32 least = (u32)shared.bin << 21;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (keys[i] && (keys[i] ^ least) >> 21 == 0) atomicAdd(&shared.bins[1][keys[i] >> 10 & 2047], 1);
  }
  __syncthreads();
  find_bin(shared, 1, shared.wanted);
  least |= (u32)shared.bin << 10;
  int wanted = 0;
  if (shared.wanted == shared.inside) {
    // Most often all that agree in 22 bits are chosen: what is above the number before them.
    least -= 1;
  } else {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (keys[i] && (keys[i] ^ least) >> 10 == 0) atomicAdd(&shared.bins[2][keys[i] & 1023], 1);
    }
    __syncthreads();
    find_bin(shared, 2, shared.wanted);
    least |= shared.bin;
    wanted = shared.wanted;
  }

  Counts own{0, 0};
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    own.above += keys[i] > least;
    own.equal += keys[i] == least;
  }
  own.above = __reduce_add_sync(~0u, own.above);
  own.equal = __reduce_add_sync(~0u, own.equal);
  if (lane == 0) shared.warps[warp] = own;
  __syncthreads();
  Counts other = lane < warp ? shared.warps[lane] : Counts{0, 0};
  int equal_before = __reduce_add_sync(~0u, other.equal);
  int written = __reduce_add_sync(~0u, other.above) + min(equal_before, wanted);
  u32 earlier = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (i >= rounds) break;
    bool equal = keys[i] == least;
    u32 equals = __ballot_sync(~0u, equal);
    bool taken = keys[i] > least || (equal && equal_before + __popc(equals & earlier) < wanted);
    u32 all = __ballot_sync(~0u, taken);
    if (taken) out[written + __popc(all & earlier)] = first + 32 * i;
    written += __popc(all);
    equal_before += __popc(equals);
  }
}

#define CHOOSE(OWN)                                                                                                    \
  extern "C" __device__ int choose_##OWN##_shared_bytes = sizeof(Shared);                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) choose_##OWN(const __grid_constant__ Arguments given) {     \
    extern __shared__ __align__(16) u8 memory[];                                                                       \
    choose_held<OWN>(*reinterpret_cast<Shared*>(memory), given);                                                       \
  }

CHOOSE(8)
CHOOSE(16)
