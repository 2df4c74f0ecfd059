// How the work on few tokens is divided among CTAs that all run at once: equal bytes for each, in units of one or a few strips
// of 16 outputs.

#pragma once

#include "products.cuh"

// A team of PARTS warps makes a unit of the first product, and each of its warps a part of the inputs. A warp makes a
// unit of the last product alone.
constexpr int WARPS = 16, PARTS = 8, TEAMS = WARPS / PARTS;
constexpr int STRIP = 16, TILE_STRIPS = TILE_OUTPUTS / STRIP, MOST_STRIPS = 3;
// Choices of all tokens: a lane each.
constexpr int MOST_CHOICES = 32;

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

// An expert's place among those that are chosen, and the unit's first strip.
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

  // All CTAs have equally many units of the last product, even if they have unequally many of the first one: when the rows
  // arrive, weights have been copied, and only their decoding is left.
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

// The choices that name an expert, at most one of each token.
struct Pairs {
  static constexpr u32 NONE = 0xFF;
  // A byte for each token: the choice's number among all tokens', or NONE.
  u32 bytes;

  __device__ __forceinline__ bool has(int token) const { return of(token) != NONE; }
  __device__ __forceinline__ u32 of(int token) const { return bytes >> token * 8 & 0xFF; }
};

// The experts that tokens have chosen, each once, by their first choice.
struct Touched {
  int experts[MOST_CHOICES];
  Pairs pairs[MOST_CHOICES];
  int count;

  // Called by one warp, whose lanes have one choice each, token after token; no expert is chosen twice by a token.
  // choice: the expert, negative for none; choices: of a token.
  __device__ __forceinline__ void find(int choice, int choices) {
    int lane = threadIdx.x % 32;
    u32 same = __match_any_sync(~0u, choice), of_first = ~0u >> (MOST_CHOICES - choices);
    bool first = choice >= 0 && lane == __ffs(same) - 1;
    u32 found = __ballot_sync(~0u, first);
    int place = __popc(found & ((1u << lane) - 1));
    u32 by_first = same & of_first, by_second = same & ~of_first;
    if (first) {
      experts[place] = choice;
      pairs[place].bytes = (by_first ? __ffs(by_first) - 1 : Pairs::NONE) | (by_second ? __ffs(by_second) - 1 : Pairs::NONE) << 8;
    }
    if (lane == 0) count = __popc(found);
  }
};
