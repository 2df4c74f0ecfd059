// Before the attending kernel: how the work is cut, once a step.
//
// A request is laid whole into the first part that has room for it, the longest requests first; those that found none are laid
// one behind the other into what is left of the parts. So few are cut, and each of them is longer than any part's rest: they
// are fewer than parts. A part does its pieces of cut requests last: when they are joined the cache still holds them.

#include "parts.cuh"

// Units that a piece costs beside its own, about; and what larger parts may cost so that nothing need be joined.
constexpr int PIECE_COST = 2, CUT_COST = 3;
// The fewest units of a part, and of a piece but a request's last.
constexpr int FEWEST_UNITS = 4;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
// A part is one processor's at the least.
constexpr int LANE_PARTS = 5, MOST_PARTS = 32 * LANE_PARTS;

struct Left {
  // Its place in the order of requests.
  unsigned short place, units;
};

struct CutPiece {
  // `left` is the index of what it is a piece of.
  unsigned short part, left, first, last;
};

// What one warp makes of one capacity.
struct Trial {
  // Requests that found no room, and their pieces, part by part; where each part's begin.
  Left left[MOST_PARTS];
  CutPiece pieces[2 * MOST_PARTS];
  int begins[MOST_PARTS + 1], room[MOST_PARTS], left_count;
};

// Each lane has, of some parts, the room that is left and the whole requests.
struct Packing {
  int room[LANE_PARTS], whole[LANE_PARTS];
};

// All threads: the units of each request, and what all cost.
__device__ __forceinline__ void rate(const Work& work, int& total) {
  int own = 0;
#pragma unroll 1
  for (int request = threadIdx.x; request < work.requests; request += THREADS) {
    int units = (work.lengths[request] + work.unit_tokens - 1) / work.unit_tokens;
    work.units[request] = units;
    own += units + PIECE_COST;
  }
  own = __reduce_add_sync(~0u, own);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, own);
}

// All threads: requests by falling length. Before each are those that are longer, and as long with a smaller index.
__device__ __forceinline__ void sort(const Work& work) {
#pragma unroll 1
  for (int request = threadIdx.x; request < work.requests; request += THREADS) {
    int units = work.units[request], before = 0;
#pragma unroll 8
    for (int other = 0; other < work.requests; other++) before += work.units[other] + (other < request) > units;
    work.order[before] = make_int2(request, units);
  }
}

// One warp: whole requests into parts. `places` tells of each, in the order, its part and how many are there before it; below
// zero, it found no room.
__device__ __forceinline__ void pack(const Work& work, int capacity, Packing& packing, Trial& trial, int* places) {
  int lane = threadIdx.x % 32, count = 0, own = 0;
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) {
    packing.room[i] = i * 32 + lane < work.part_count ? capacity : 0;
    packing.whole[i] = 0;
  }
#pragma unroll 1
  for (int at = 0; at < work.requests; at++) {
    if (at % 32 == 0 && at + lane < work.requests) own = work.order[at + lane].y;
    int units = __shfl_sync(~0u, own, at % 32), part = -1, place = -1;
#pragma unroll
    for (int i = LANE_PARTS - 1; i >= 0; i--) {
      u32 roomy = __ballot_sync(~0u, packing.room[i] >= units + PIECE_COST);
      if (roomy) part = i * 32 + __ffs(roomy) - 1;
    }
#pragma unroll
    for (int i = 0; i < LANE_PARTS; i++) {
      bool here = part == i * 32 + lane;
      if (here) place = part * work.requests + packing.whole[i];
      packing.whole[i] += here;
      packing.room[i] -= here ? units + PIECE_COST : 0;
    }
    if (part < 0 ? lane == 0 : place >= 0) places[at] = place;
    if (part >= 0) continue;
    if (lane == 0 && count < MOST_PARTS) trial.left[count] = {(unsigned short)at, (unsigned short)units};
    count++;
  }
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) trial.room[i * 32 + lane] = packing.room[i];
  if (lane == 0) trial.left_count = count;
  __syncwarp();
}

// One thread: what found no room, into what is left of the parts. Whether all of it fits.
__device__ __forceinline__ bool fill(const Work& work, Trial& trial) {
  if (trial.left_count > MOST_PARTS) return false;
  int left = 0, first = 0, count = 0, units = trial.left[0].units;
#pragma unroll 1
  for (int part = 0; part < work.part_count; part++) {
    int room = trial.room[part];
    trial.begins[part] = count;
#pragma unroll 1
    while (left < trial.left_count && room - PIECE_COST >= min(units - first, FEWEST_UNITS)) {
      int last = min(first + room - PIECE_COST, units);
      trial.pieces[count++] = {(unsigned short)part, (unsigned short)left, (unsigned short)first, (unsigned short)last};
      room -= last - first + PIECE_COST;
      first = last;
      if (last < units) continue;
      first = 0;
      if (++left < trial.left_count) units = trial.left[left].units;
    }
  }
  trial.begins[work.part_count] = count;
  return left == trial.left_count;
}

// One warp: where each part's pieces begin.
__device__ __forceinline__ void number(const Work& work, const Packing& packing, const Trial& trial, int* begins, int* whole) {
  int lane = threadIdx.x % 32, before = 0;
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) {
    int part = i * 32 + lane, sum = packing.whole[i];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    whole[part] = packing.whole[i];
    if (part <= work.part_count) begins[part] = work.parts[part] = before + sum - packing.whole[i] + trial.begins[part];
    before += __shfl_sync(~0u, sum, 31);
  }
}

// All threads: pieces of cut requests, behind the whole ones of their parts.
__device__ __forceinline__ void store_cut(const Work& work, const Trial& trial, const int* begins, const int* whole) {
#pragma unroll 1
  for (int slot = threadIdx.x; slot < trial.begins[work.part_count]; slot += THREADS) {
    CutPiece piece = trial.pieces[slot];
    Left left = trial.left[piece.left];
    int request = work.order[left.place].x;
    work.pieces[begins[piece.part] + whole[piece.part] + slot - trial.begins[piece.part]] =
        Piece{request, piece.first, piece.last, slot};
    Cut& cut = work.cuts[piece.left];
    if (piece.first == 0) cut.request = request;
    if (piece.first == 0) cut.first = slot;
    if (piece.last == left.units) cut.last = slot + 1;
  }
#pragma unroll 1
  for (int i = trial.left_count + threadIdx.x; i < work.part_count; i += THREADS) work.cuts[i] = Cut{0, 0, 0, 0};
}

// All threads.
__device__ __forceinline__ void store_whole(const Work& work, const int* places, const int* begins) {
#pragma unroll 1
  for (int at = threadIdx.x; at < work.requests; at += THREADS) {
    int place = places[at];
    int2 own = work.order[at];
    if (place >= 0) work.pieces[begins[place / work.requests] + place % work.requests] = Piece{own.x, 0, own.y, -1};
  }
}

// One CTA: each warp tries a capacity, the least that may suffice or some units more. With seven more all requests find room:
// a part has one piece at the most that a border makes, which costs 2, and leaves less than 2 + 4.
extern "C" __global__ void __launch_bounds__(THREADS) schedule(const __grid_constant__ Work work) {
  __shared__ Trial trials[WARPS];
  __shared__ int total, best, begins[MOST_PARTS + 1], whole[MOST_PARTS];
  int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    total = 0;
    best = 1 << 30;
  }
  __syncthreads();
  rate(work, total);
  __syncthreads();
  sort(work);
  __syncthreads();
  int least = max((total + work.part_count - 1) / work.part_count, FEWEST_UNITS + PIECE_COST);
  Packing packing;
  pack(work, least + warp, packing, trials[warp], work.tried + warp * work.requests);
  // The lower bits tell which it was.
  if (threadIdx.x % 32 == 0 && fill(work, trials[warp]))
    atomicMin(&best, (warp + (trials[warp].left_count ? CUT_COST : 0)) * WARPS + warp);
  __syncthreads();
  int chosen = best % WARPS;
  if (warp == chosen) number(work, packing, trials[chosen], begins, whole);
  __syncthreads();
  store_cut(work, trials[chosen], begins, whole);
  store_whole(work, work.tried + chosen * work.requests, begins);
}
