// The positions of a query's highest scores, exactly, by radix selection in a cluster of CTAs (sm_90).
//
// Work. A cluster of up to 8 CTAs chooses for one query. Each has a part of what the query sees, and each of its warps a part of
// that, one after another. Scores become integers of the same order, which stay in shared memory as far as there is room. All are
// looked at twice: a histogram of their 11 highest bits gives the bin of the least chosen one, and two bits of each say whether it
// is above that bin or in it. From then on only the latter count: histograms of their 11 next bits and of the last 10, each summed
// over the cluster, give the least chosen score exactly, and leave bits that say which scores are above it and which equal it. Then
// every warp counts its bits, and writes their positions after those of the parts before. Two CTAs run on a multiprocessor, or
// one with room for more scores: of long rows fewer of them meet then, and clusters of all queries find room at once.
//
// Bytes: 4 a score once, from memory or, where the previous kernel has just written them, from the second-level cache; 4 for each
// position chosen.

#include "../../cuda/cluster.cuh"
#include "ordered.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32, MOST_CTAS = 8;
// Scores of a CTA for which it has room: if two run on a multiprocessor, and if one does.
constexpr int USUAL_HELD = 16384, LONG_HELD = 47104;
// The most scores of a CTA, which are marked, 32 at a time.
constexpr int MARKED = 65536;

template <int HELD>
struct Shared {
  alignas(16) u32 held[HELD];
  // By pass.
  int bins[PASSES][BINS];
  // By 32 scores: those above the least chosen one as far as it is known, and those that may equal it.
  uint2 marks[MARKED / 32];
  int warp_sums[WARPS];
  Counts warps[WARPS], all;
  // The bin of the least chosen score, how many are in it, and how many of those are chosen.
  int bin, inside, wanted;
  // The CTAs of the cluster that choose.
  int ctas;
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
  u32 ctas = shared.ctas;
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
    shared.inside = in_high ? high : low;
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

// Counts a score that may be the least chosen one by the bits of a pass.
template <int HELD>
__device__ __forceinline__ void count_bits(Shared<HELD>& shared, u32 key, int pass) {
  if (pass == 1) atomicAdd(&shared.bins[1][key >> 10 & 2047], 1);
  if (pass == 2) atomicAdd(&shared.bins[2][key & 1023], 1);
}

// A warp: marks its scores that are above the bin of the first pass or in it, and counts the latter.
template <int HELD>
__device__ __forceinline__ void mark(Shared<HELD>& shared, const Part& part, u32 bin) {
#pragma unroll 4
  for (int start = part.first; start < part.last; start += 32) {
    int at = start + threadIdx.x % 32;
    // No score becomes zero.
    u32 key = at < part.last ? part.key(shared, at) : 0;
    bool equal = key && key >> 21 == bin;
    u32 above = __ballot_sync(~0u, key >> 21 > bin), equals = __ballot_sync(~0u, equal);
    if (equal) count_bits(shared, key, 1);
    if (threadIdx.x % 32 == 0) shared.marks[start / 32] = make_uint2(above, equals);
  }
  __syncwarp();
}

// A warp: compares the scores that may be the least chosen one by the bits from `shift` on, and counts those that still may be by
// the bits of `pass`, if there is one. A lane has every 32nd word of marks. It begins at another place in each: lanes then
// read different banks.
template <int HELD>
__device__ __forceinline__ Counts narrow(Shared<HELD>& shared, const Part& part, u32 least, int shift, int pass) {
  int lane = threadIdx.x % 32;
  Counts found{0, 0};
  for (int start = part.first + lane * 32; start < part.last; start += 32 * 32) {
    uint2 marks = shared.marks[start / 32];
    for (u32 left = __funnelshift_r(marks.y, marks.y, lane); left; left &= left - 1) {
      int bit = (__ffs(left) - 1 + lane) % 32;
      u32 key = part.key(shared, start + bit);
      if (key >> shift == least >> shift) {
        count_bits(shared, key, pass);
      } else {
        marks.y ^= 1u << bit;
        if (key > least) marks.x |= 1u << bit;
      }
    }
    shared.marks[start / 32] = marks;
    found.above += __popc(marks.x);
    found.equal += __popc(marks.y);
  }
  return found;
}

// All threads: what the parts before this warp's have, in the CTA and in the cluster's earlier CTAs. own: of this thread.
template <int HELD>
__device__ __forceinline__ Counts count_before(Shared<HELD>& shared, Counts own) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
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

// A warp: the sum of `own` over the lanes before this one, and over all.
__device__ __forceinline__ int2 sum_of_lanes(int own) {
  int lane = threadIdx.x % 32, sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return make_int2(sum - own, __shfl_sync(~0u, sum, 31));
}

// A warp: writes the positions of its part's chosen scores. `begin` is the position of the CTA's first score.
template <int HELD>
__device__ __forceinline__ void write(const Shared<HELD>& shared, const Part& part, int wanted, Counts before, int begin, int* out) {
  out += before.above + min(before.equal, wanted);
  wanted -= before.equal;
  for (int first = part.first; first < part.last; first += 32 * 32) {
    int start = first + threadIdx.x % 32 * 32;
    uint2 marks = start < part.last ? shared.marks[start / 32] : make_uint2(0, 0);
    int2 equals = sum_of_lanes(__popc(marks.y));
    // Earlier ones of equal scores are taken.
    u32 later = marks.y;
    for (int taken = equals.x; taken < wanted && later; taken++) later &= later - 1;
    wanted -= equals.y;
    u32 chosen = marks.x | (marks.y ^ later);
    int2 places = sum_of_lanes(__popc(chosen));
    for (int* place = out + places.x; chosen; chosen &= chosen - 1) *place++ = begin + start + __ffs(chosen) - 1;
    out += places.y;
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
  if (tokens <= given.few) return;
  if (tokens <= given.count) {
    for (int i = rank * THREADS + threadIdx.x; i < given.count; i += ctas * THREADS) out[i] = i < tokens ? i : NO_TOKEN;
    return;
  }
  // CTAs that leave make room for other clusters; those that stay meet without them.
  if (given.turns) ctas = min(ctas, (tokens + USUAL_HELD - 1) / USUAL_HELD);
  if (rank >= ctas) return;
  if (threadIdx.x == 0) shared.ctas = ctas;
  // Parts of warps are multiples of 32, but for the last.
  int of_warp = (tokens + ctas * THREADS - 1) / (ctas * THREADS) * 32, begin = rank * WARPS * of_warp;
  int own = max(min(tokens - begin, WARPS * of_warp), 0), warp = threadIdx.x / 32;
  Part part{given.scores + query * given.width + begin, min(warp * of_warp, own), min((warp + 1) * of_warp, own)};
  read_scores(shared, part);
  cluster_meet();
  find_bin(shared, 0, given.count);
  u32 least = (u32)shared.bin << 21;
  mark(shared, part, shared.bin);
  cluster_meet();
  find_bin(shared, 1, shared.wanted);
  least |= (u32)shared.bin << 10;
  // Most often all that agree in 22 bits are chosen: what their other bits are does not matter.
  bool all = shared.wanted == shared.inside;
  Counts marked = narrow(shared, part, least, 10, all ? PASSES : 2);
  if (!all) {
    cluster_meet();
    find_bin(shared, 2, shared.wanted);
    marked = narrow(shared, part, least | shared.bin, 0, PASSES);
  }
  int wanted = shared.wanted;
  // A lane reads marks in `write` that it has written.
  write(shared, part, wanted, count_before(shared, marked), begin, out);
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
