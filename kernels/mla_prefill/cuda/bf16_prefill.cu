// Attention over ragged prompts of bf16, for Hopper (sm_90a): keys 192 wide, values 128, or as the source that
// includes this says.
//
// A tile is 128 queries of one head of a prompt against all keys that they see, 128 at a time. Tiles with most keys come first.
// A prompt's last keys come first: the diagonal is masked before the loop, and CTAs with different tiles of a head read
// different blocks at a time. In the other direction they all read the same blocks at once, which takes 7 to 15% longer.
// `notes.md` has what was tried.

#include "tile_producer.cuh"

struct Arguments {
  Inputs inputs;
  // The tiles, those with most keys first.
  const Tile* tiles;
};

#ifndef ARGUMENTS
#define ARGUMENTS Arguments
#endif

#define ATTEND(NAME, QUANTIZES)                                                                            \
  extern "C" __device__ int NAME##_shared_bytes = sizeof(Shared);                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ ARGUMENTS given) { \
    attend<TileProducer<ARGUMENTS>, QUANTIZES>(given);                                                     \
  }

ATTEND(attend_prompts, false)
#if VALUE_CHANNELS % 128 == 0
ATTEND(attend_prompts_and_quantize, true)
#endif
