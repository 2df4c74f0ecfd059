// The positions of a query's highest scores, exactly, by radix selection in a cluster of CTAs (sm_90).
//
// Work. A cluster of up to 8 CTAs chooses for one query. Each has a part of what the query sees, and each of its warps a part of
// that, one after another. Scores become integers of the same order, which stay in shared memory as far as there is room.
// Histograms of their 11 highest bits, then of the 11 next ones of those that agree with the least chosen score so far, then of
// the last 10, each summed over the cluster, give that score exactly. Then every warp counts what it has above and at that
// score, and writes its positions after those of the parts before. Two CTAs run on a multiprocessor, or one with room
// for more scores: of long rows fewer of them meet then, and clusters of all queries find room at once.
//
// Bytes: 4 a score once, from memory or, where the previous kernel has just written them, from the second-level cache; 4 for each
// position chosen.

#include "../../cuda/cluster.cuh"
#include "ordered.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32, MOST_CTAS = 8;
// Scores of a CTA for which it has room: if two run on a multiprocessor, and if one does.
constexpr int USUAL_HELD = 16384, LONG_HELD = 51200;

template <int HELD>
struct Shared {
  alignas(16) u32 held[HELD];
  // By pass.
  int bins[PASSES][BINS];
  int warp_sums[WARPS];
  Counts warps[WARPS], all;
  // The bin of the least chosen score, and how many are chosen of those in it.
  int bin, wanted;
};

// The scores of one warp: the CTA's from `first` to `last`, counted in the CTA's part.
struct Part {
  const float* scores;
  int first, last;

  template <int HELD>
  __device__ __forceinline__ u32 key(const Shared<HELD>& shared, int at) const { return at < HELD ? shared.held[at] : ordered(scores[at]); }
};

// Two numbers at the same place in the shared memory of the cluster's CTA `rank`.
__device__ __forceinline__ int2 there(const void* place, u32 rank) {
  int2 found;
  asm volatile("{\n .reg .u32 there;\n mapa.shared::cluster.u32 there, %2, %3;\n ld.shared::cluster.v2.s32 {%0, %1}, [there];\n}"
               : "=r"(found.x), "=r"(found.y) : "r"(shared_address(place)), "r"(rank) : "memory");
  return found;
}

// All threads: finds the bin of the least chosen score among those of the pass, and how many of that bin are chosen.
template <int HELD>
__device__ __forceinline__ void find_bin(Shared<HELD>& shared, int pass, int wanted) {
  static_assert(BINS == 2 * THREADS, "a thread has two bins");
  int low = 0, high = 0;
  // The first thread has the highest bins.
  int lowest = BINS - 2 * (threadIdx.x + 1);
  u32 ctas = cluster_size();
  int2 found[MOST_CTAS];
#pragma unroll
  for (u32 rank = 0; rank < MOST_CTAS; rank++) found[rank] = rank < ctas ? there(&shared.bins[pass][lowest], rank) : make_int2(0, 0);
#pragma unroll
  for (int rank = 0; rank < MOST_CTAS; rank++) {
    low += found[rank].x;
    high += found[rank].y;
  }
  int own = low + high, above = sum_before(shared.warp_sums, own);
  if (above < wanted && above + own >= wanted) {
    bool in_high = above + high >= wanted;
    shared.bin = lowest + in_high;
    shared.wanted = wanted - above - (in_high ? 0 : high);
  }
  __syncthreads();
}

// All warps: reads the scores, and counts them by their highest bits.
template <int HELD>
__device__ __forceinline__ void read_scores(Shared<HELD>& shared, const Part& part) {
#pragma unroll 8
  for (int at = part.first + threadIdx.x % 32; at < part.last; at += 32) {
    u32 key = ordered(part.scores[at]);
    if (at < HELD) shared.held[at] = key;
    atomicAdd(&shared.bins[0][key >> 21], 1);
  }
}

// All warps: counts by their next bits, from `shift` on, the scores that agree with `least` above them.
template <int HELD>
__device__ __forceinline__ void count_bins(Shared<HELD>& shared, const Part& part, int pass, u32 least, int shift, int bits) {
  for (int at = part.first + threadIdx.x % 32; at < part.last; at += 32) {
    u32 key = part.key(shared, at);
    if ((key ^ least) >> (shift + bits) == 0) atomicAdd(&shared.bins[pass][key >> shift & ((1 << bits) - 1)], 1);
  }
}

// All threads: what the parts before this warp's have, in the CTA and in the cluster's earlier CTAs.
template <int HELD>
__device__ __forceinline__ Counts count_before(Shared<HELD>& shared, const Part& part, u32 least) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Counts own{0, 0};
  for (int at = part.first + lane; at < part.last; at += 32) {
    u32 key = part.key(shared, at);
    own.above += key > least;
    own.equal += key == least;
  }
  own.above = __reduce_add_sync(~0u, own.above);
  own.equal = __reduce_add_sync(~0u, own.equal);
  if (lane == 0) shared.warps[warp] = own;
  __syncthreads();
  Counts other = shared.warps[lane];
  Counts before{__reduce_add_sync(~0u, lane < warp ? other.above : 0), __reduce_add_sync(~0u, lane < warp ? other.equal : 0)};
  if (threadIdx.x == THREADS - 1) shared.all = {before.above + own.above, before.equal + own.equal};
  cluster_meet();
  for (u32 rank = 0; rank < cluster_rank(); rank++) {
    int2 all = there(&shared.all, rank);
    before.above += all.x;
    before.equal += all.y;
  }
  return before;
}

// A warp: writes the positions of its part's chosen scores. `begin` is the position of the CTA's first score.
template <int HELD>
__device__ __forceinline__ void write(const Shared<HELD>& shared, const Part& part, u32 least, int wanted, Counts before, int begin, int* out) {
  int lane = threadIdx.x % 32, written = before.above + min(before.equal, wanted), equal_before = before.equal;
  u32 earlier = (1u << lane) - 1;
  for (int start = part.first; start < part.last; start += 32) {
    int at = start + lane;
    bool inside = at < part.last;
    u32 key = inside ? part.key(shared, at) : 0;
    bool equal = inside && key == least;
    u32 equals = __ballot_sync(~0u, equal);
    bool taken = inside && (key > least || (equal && equal_before + __popc(equals & earlier) < wanted));
    u32 all = __ballot_sync(~0u, taken);
    if (taken) out[written + __popc(all & earlier)] = begin + at;
    written += __popc(all);
    equal_before += __popc(equals);
  }
}

template <int HELD>
__device__ __forceinline__ void choose_in(Shared<HELD>& shared, const Arguments& given) {
  int ctas = cluster_size(), rank = cluster_rank();
  long long query = blockIdx.x / ctas;
  for (int i = threadIdx.x; i < PASSES * BINS; i += THREADS) shared.bins[i / BINS][i % BINS] = 0;
  __syncthreads();
  wait_for_earlier();
  start_next();
  int tokens = given.seen[query], *out = given.out + query * given.count;
  if (tokens <= given.count) {
    for (int i = rank * THREADS + threadIdx.x; i < given.count; i += ctas * THREADS) out[i] = i < tokens ? i : NO_TOKEN;
    return;
  }
  // Parts of warps are multiples of 32, but for the last.
  int of_warp = (tokens + ctas * THREADS - 1) / (ctas * THREADS) * 32, begin = rank * WARPS * of_warp;
  int own = max(min(tokens - begin, WARPS * of_warp), 0), warp = threadIdx.x / 32;
  Part part{given.scores + query * given.width + begin, min(warp * of_warp, own), min((warp + 1) * of_warp, own)};
  read_scores(shared, part);
  cluster_meet();
  find_bin(shared, 0, given.count);
  u32 least = (u32)shared.bin << 21;
  count_bins(shared, part, 1, least, 10, 11);
  cluster_meet();
  find_bin(shared, 1, shared.wanted);
  least |= (u32)shared.bin << 10;
  count_bins(shared, part, 2, least, 0, 10);
  cluster_meet();
  find_bin(shared, 2, shared.wanted);
  least |= shared.bin;
  int wanted = shared.wanted;
  write(shared, part, least, wanted, count_before(shared, part, least), begin, out);
  // A CTA must not exit while another may still read its counts.
  cluster_meet();
}

#define CHOOSE(NAME, HELD, CTAS)                                                                                       \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared<HELD>);                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, CTAS) NAME(const __grid_constant__ Arguments given) {          \
    extern __shared__ __align__(16) u8 memory[];                                                                       \
    choose_in(*reinterpret_cast<Shared<HELD>*>(memory), given);                                                        \
  }

CHOOSE(choose, USUAL_HELD, 2)
CHOOSE(choose_long, LONG_HELD, 1)
