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

// How one warp divides the work, for one capacity of the parts.
struct Trial {
  // Requests that found no room, laid one after the other along what is left of the parts: where each begins. A part's room, which
  // one piece's cost is taken from, ends at `ends`.
  Left left[MOST_PARTS];
  int starts[MOST_PARTS], ends[MOST_PARTS], left_count;
  // Index of each part's first piece among these requests' pieces.
  int begins[MOST_PARTS + 1];

  __device__ __forceinline__ int start_of(int part) const { return part ? ends[part - 1] : 0; }
  // The first request that goes on after this place.
  __device__ __forceinline__ int first_after(int place) const {
    int low = 0, high = left_count;
    while (low < high) {
      int middle = (low + high) / 2;
      if (starts[middle] + left[middle].units > place)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
  __device__ __forceinline__ int pieces_of(int part) const {
    int first = first_after(start_of(part)), count = 0;
    if (start_of(part) == ends[part]) return 0;
    while (first + count < left_count && starts[first + count] < ends[part]) count++;
    return count;
  }
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
  // The longest ones find no room in any part.
#pragma unroll 1
  for (bool all = true; all && count < work.requests;) {
    int at = count + lane, units = at < work.requests ? work.order[at].y : 0;
    bool left = units + PIECE_COST > capacity;
    if (left) places[at] = -1;
    if (left && at < MOST_PARTS) trial.left[at] = {(unsigned short)at, (unsigned short)units};
    u32 found = __ballot_sync(~0u, left);
    count += __popc(found);
    all = found == ~0u;
  }
  int first = count;
#pragma unroll 1
  for (int at = first; at < work.requests; at++) {
    if ((at - first) % 32 == 0 && at + lane < work.requests) own = work.order[at + lane].y;
    int units = __shfl_sync(~0u, own, (at - first) % 32), part = -1, place = -1;
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
  if (lane == 0) trial.left_count = count;
  __syncwarp();
}

__device__ __forceinline__ int fewest_units(const Work& work) {
  return work.requests * work.query_tokens <= FEW_TOKENS ? FEWEST_OF_FEW : FEWEST_UNITS;
}

// One warp: an inclusive sum over all parts.
__device__ __forceinline__ void add_up(int (&values)[LANE_PARTS]) {
  int lane = threadIdx.x % 32, before = 0;
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, values[i], step);
      if (lane >= step) values[i] += other;
    }
    values[i] += before;
    before = __shfl_sync(~0u, values[i], 31);
  }
}

// One warp: lays the requests that found no room along what is left of the parts. Parts with little room stay out. Returns whether
// all of them fit.
__device__ __forceinline__ bool fill(const Work& work, const Packing& packing, Trial& trial) {
  int lane = threadIdx.x % 32, fewest = fewest_units(work), ends[LANE_PARTS], start = 0;
  if (trial.left_count > MOST_PARTS) return false;
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) {
    int room = packing.room[i] - PIECE_COST;
    ends[i] = room >= fewest ? room : 0;
  }
  add_up(ends);
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) trial.ends[i * 32 + lane] = ends[i];
#pragma unroll 1
  for (int left = 0; left < trial.left_count; left++) {
    int end = start + trial.left[left].units, part = -1, own = 0;
#pragma unroll
    for (int i = LANE_PARTS - 1; i >= 0; i--) {
      u32 reached = __ballot_sync(~0u, ends[i] >= end);
      if (reached) part = i * 32 + __ffs(reached) - 1;
      if (reached) own = ends[i];
    }
    if (part < 0) return false;
    int last = __shfl_sync(~0u, own, part % 32);
    if (lane == 0) trial.starts[left] = start;
    // The next request begins in the same part only if the piece is worth its cost.
    int next = left + 1 < trial.left_count ? trial.left[left + 1].units : 0;
    start = last - end - PIECE_COST >= min(next, fewest) ? end + PIECE_COST : last;
  }
  __syncwarp();
  return true;
}

// What splitting this many requests costs, in units.
__device__ __forceinline__ int split_cost(int requests) { return requests ? SPLIT_COST + requests / SPLITS_OF_A_UNIT : 0; }

// One warp: the index of each part's first piece, among all and among those of split requests.
__device__ __forceinline__ void number(const Work& work, const Packing& packing, Trial& trial, int* begins, int* whole) {
  int lane = threadIdx.x % 32, split[LANE_PARTS], all[LANE_PARTS], own_split[LANE_PARTS], own_all[LANE_PARTS];
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) {
    int part = i * 32 + lane;
    own_split[i] = split[i] = part < work.part_count ? trial.pieces_of(part) : 0;
    own_all[i] = all[i] = split[i] + packing.whole[i];
  }
  add_up(split);
  add_up(all);
#pragma unroll
  for (int i = 0; i < LANE_PARTS; i++) {
    int part = i * 32 + lane;
    whole[part] = packing.whole[i];
    trial.begins[part] = split[i] - own_split[i];
    if (part <= work.part_count) begins[part] = work.parts[part] = all[i] - own_all[i];
  }
}

// All threads: stores the pieces of split requests, after the whole ones of their parts.
__device__ __forceinline__ void store_split(const Work& work, const Trial& trial, const int* begins, const int* whole) {
#pragma unroll 1
  for (int part = threadIdx.x; part < work.part_count; part += THREADS) {
    int start = trial.start_of(part), left = trial.first_after(start), place = begins[part] + whole[part];
#pragma unroll 1
    for (int slot = trial.begins[part]; slot < trial.begins[part + 1]; slot++, left++) {
      int units = trial.left[left].units, first = max(start - trial.starts[left], 0);
      int last = min(trial.ends[part] - trial.starts[left], units), request = work.order[trial.left[left].place].x;
      work.pieces[place++] = Piece{request, first, last, slot};
      SplitRequest& split = work.split_requests[left];
      if (first == 0) split.request = request;
      if (first == 0) split.first = slot;
      if (last == units) split.last = slot + 1;
    }
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
  if (fill(work, packing, trials[warp]) && threadIdx.x % 32 == 0)
        atomicMin(&best, (warp + split_cost(trials[warp].left_count)) * WARPS + warp);
  __syncthreads();
  int chosen = best % WARPS;
  if (warp == chosen) number(work, packing, trials[chosen], begins, whole);
  __syncthreads();
  store_split(work, trials[chosen], begins, whole);
  store_whole(work, work.tried + chosen * work.requests, begins);
}
