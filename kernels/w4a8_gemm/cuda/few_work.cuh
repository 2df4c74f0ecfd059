// Who computes what of few rows, with all CTAs at once: equal bytes for each, in units of a strip of 16 outputs or a
// few.

#pragma once

#include "packing.cuh"

// A team of PARTS warps makes a unit of the first product, and each of its warps a part of the inputs. A warp makes a
// unit of the last product alone.
constexpr int WARPS = 16, PARTS = 8, TEAMS = WARPS / PARTS;
constexpr int STRIP = 16, TILE_STRIPS = TILE_OUTPUTS / STRIP, MOST_STRIPS = 3;

struct Weight {
  // [experts, output_tiles, groups, TILE_BYTES].
  const u8* tiles;
  int output_tiles, groups;

  __device__ __forceinline__ int strips() const { return output_tiles * TILE_STRIPS; }
};

__device__ __forceinline__ int ceil_divide(int value, int by) { return (value + by - 1) / by; }

// Divides numbers below 2^22: (number + 1/2) / by is farther from a whole number than float32 is exact.
struct Divisor {
  int by;
  float inverse;

  __device__ __forceinline__ explicit Divisor(int by) : by(by), inverse(1.0f / by) {}
  __device__ __forceinline__ int quotient(int number) const { return static_cast<int>((number + 0.5f) * inverse); }
};

// An expert's place among those that have rows, and the unit's first strip.
struct Unit {
  int place, strip;
};

// A CTA's range of the last product's units.
struct Range {
  int begin, end;
};

// Units of STRIPS strips of one expert; the last one of an expert may have fewer.
template <int STRIPS>
struct Work {
  // Units of an expert, and how many experts have rows.
  Divisor first, last;
  int touched;

  __device__ __forceinline__ Work(const Weight& first, const Weight& last)
      : first(ceil_divide(first.strips(), STRIPS)), last(ceil_divide(last.strips(), STRIPS)), touched(0) {}

  // The number of a team's unit of the first product, which are dealt in turns; there is none if it is not below
  // `first_units`.
  __device__ __forceinline__ int first_unit(int team, int round) const {
    return blockIdx.x + gridDim.x * (team + TEAMS * round);
  }
  __device__ __forceinline__ int first_units() const { return touched * first.by; }

  // All CTAs have as many units of the last product, though not of the first one: its weights have been copied when
  // rows come, and only their decoding is left.
  __device__ __forceinline__ Range last_units() const {
    int units = touched * last.by, ctas = gridDim.x, cta = blockIdx.x;
    return Range{units * cta / ctas, units * (cta + 1) / ctas};
  }
  // The number of a warp's unit among these. Teams that have fewer units of the first product begin with the last
  // one's.
  __device__ __forceinline__ static int last_unit(const Range& units, int warp, int round) {
    return units.begin + (warp + PARTS) % WARPS + WARPS * round;
  }

  __device__ __forceinline__ static Unit unit(int number, const Divisor& each) {
    int place = each.quotient(number);
    return Unit{place, (number - place * each.by) * STRIPS};
  }
};

// The experts that have rows, in order, by one thread for each of MOST_EXPERTS: expert + (rows << 16). Returns how many
// there are.
__device__ __forceinline__ int find_touched(const int* counts, int experts, int most_rows, int (&of_warp)[WARPS],
                                            int* touched) {
  static_assert(WARPS * 32 == MOST_EXPERTS);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = threadIdx.x;
  int count = expert < experts ? counts[expert] : 0;
  u32 found = __ballot_sync(~0u, count > 0);
  if (lane == 0) of_warp[warp] = __popc(found);
  __syncthreads();
  int other = lane < WARPS ? of_warp[lane] : 0, before = __reduce_add_sync(~0u, lane < warp ? other : 0);
  if (count > 0) touched[before + __popc(found & ((1u << lane) - 1))] = expert | min(count, most_rows) << 16;
  __syncthreads();
  return __reduce_add_sync(~0u, other);
}
