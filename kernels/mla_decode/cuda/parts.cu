// Divides the work of a step, once, before its first attention kernel.
//
// Each request goes whole into the first part that has room for it, the longest requests first. The requests that find no room
// fill what is left of the parts, one after the other. So few requests are split. Each of them is longer than what is left of
// any part, so there are fewer of them than parts. A part computes its pieces of split requests last: the cache still holds
// their results when they are combined.

#include "parts.cuh"

// About the overhead of a piece, in units; by how many units parts may be larger if that avoids splitting any request; and how many
// more split requests allow another unit: `combine` takes 7 us for 30 and 13 us for 60, and a unit some 1.2 us.
constexpr int PIECE_COST = 2, SPLIT_COST = 3, SPLITS_OF_A_UNIT = 16;
// The fewest units of a part, and of a piece that is not its request's last: with few tokens, whose pieces cost little to join,
// and with more.
constexpr int FEWEST_OF_FEW = 2, FEWEST_UNITS = 4;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
// A part has at least one multiprocessor.
constexpr int LANE_PARTS = 5, MOST_PARTS = 32 * LANE_PARTS;

// A request that found no room as a whole.
struct Left {
  // Its place in the order of requests.
  unsigned short place, units;
};

struct SplitPiece {
  // `left` is the index of its request among those that found no room.
  unsigned short part, left, first, last;
};

// How one warp divides the work, for one capacity of the parts.
struct Trial {
  // Requests that found no room, and their pieces, part by part; index of each part's first piece.
  Left left[MOST_PARTS];
  SplitPiece pieces[2 * MOST_PARTS];
  int begins[MOST_PARTS + 1], room[MOST_PARTS], left_count;
};

// Each lane keeps, for some of the parts, the room that is left and the number of whole requests.
struct Packing {
  int room[LANE_PARTS], whole[LANE_PARTS];
};

// All threads: the units of each request, and the cost of all.
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

// All threads: requests in order, the longest first. Of equally long ones the smaller index comes first.
__device__ __forceinline__ void sort(const Work& work) {
#pragma unroll 1
  for (int request = threadIdx.x; request < work.requests; request += THREADS) {
    int units = work.units[request], before = 0;
#pragma unroll 8
    for (int other = 0; other < work.requests; other++) before += work.units[other] + (other < request) > units;
    work.order[before] = make_int2(request, units);
  }
}

// One warp: puts whole requests into parts. `places` gets for each request, in order, its part and the number of requests
// before it in that part; a negative place means that it found no room.
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

__device__ __forceinline__ int fewest_units(const Work& work) {
  return work.requests * work.query_tokens <= FEW_TOKENS ? FEWEST_OF_FEW : FEWEST_UNITS;
}

// One thread: splits the requests that found no room over what is left of the parts. Returns whether all of them fit.
__device__ __forceinline__ bool fill(const Work& work, Trial& trial) {
  if (trial.left_count > MOST_PARTS) return false;
  int left = 0, first = 0, count = 0, units = trial.left[0].units, fewest = fewest_units(work);
#pragma unroll 1
  for (int part = 0; part < work.part_count; part++) {
    int room = trial.room[part];
    trial.begins[part] = count;
#pragma unroll 1
    while (left < trial.left_count && room - PIECE_COST >= min(units - first, fewest)) {
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

// What splitting this many requests costs, in units.
__device__ __forceinline__ int split_cost(int requests) { return requests ? SPLIT_COST + requests / SPLITS_OF_A_UNIT : 0; }

// One warp: the index of each part's first piece.
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

// All threads: stores the pieces of split requests, after the whole ones of their parts.
__device__ __forceinline__ void store_split(const Work& work, const Trial& trial, const int* begins, const int* whole) {
#pragma unroll 1
  for (int slot = threadIdx.x; slot < trial.begins[work.part_count]; slot += THREADS) {
    SplitPiece piece = trial.pieces[slot];
    Left left = trial.left[piece.left];
    int request = work.order[left.place].x;
    work.pieces[begins[piece.part] + whole[piece.part] + slot - trial.begins[piece.part]] =
        Piece{request, piece.first, piece.last, slot};
    SplitRequest& split = work.split_requests[piece.left];
    if (piece.first == 0) split.request = request;
    if (piece.first == 0) split.first = slot;
    if (piece.last == left.units) split.last = slot + 1;
  }
#pragma unroll 1
  for (int i = trial.left_count + threadIdx.x; i < work.part_count; i += THREADS) work.split_requests[i] = SplitRequest{0, 0, 0, 0};
}

// All threads: stores the pieces that are whole requests.
__device__ __forceinline__ void store_whole(const Work& work, const int* places, const int* begins) {
#pragma unroll 1
  for (int at = threadIdx.x; at < work.requests; at += THREADS) {
    int place = places[at];
    int2 own = work.order[at];
    if (place >= 0) work.pieces[begins[place / work.requests] + place % work.requests] = Piece{own.x, 0, own.y, -1};
  }
}

// One CTA. Each warp tries a capacity: the least that could suffice, or up to seven units more. With seven more all requests
// find room: a border adds at most one piece to a part, which costs 2, and a part leaves less than 2 + 4 units unused.
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
  int least = max((total + work.part_count - 1) / work.part_count, fewest_units(work) + PIECE_COST);
  Packing packing;
  pack(work, least + warp, packing, trials[warp], work.tried + warp * work.requests);
  // The lower bits say which warp it was.
  if (threadIdx.x % 32 == 0 && fill(work, trials[warp]))
        atomicMin(&best, (warp + split_cost(trials[warp].left_count)) * WARPS + warp);
  __syncthreads();
  int chosen = best % WARPS;
  if (warp == chosen) number(work, packing, trials[chosen], begins, whole);
  __syncthreads();
  store_split(work, trials[chosen], begins, whole);
  store_whole(work, work.tried + chosen * work.requests, begins);
}
