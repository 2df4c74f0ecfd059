// Attention over a prompt of bf16 to the keys that each query has chosen, for Hopper (sm_90a): dense, with a mask.
//
// As `bf16_prefill.cu`, or as the source that includes this says, with 16 bytes more of a query and step: bits of the keys that
// count, copied next to the step's keys. A thread tests as many of them as it has scores, 2 instructions each. Blocks in which no bit is set are computed too.

#define MASKED_KEYS true
#include "tile_producer.cuh"

struct MaskedArguments {
  Inputs inputs;
  // The tiles of one prompt, those with most keys first.
  const Tile* tiles;
  // [blocks, mask_rows, 128 bits]: bit i of row q and block b is key b * 128 + i of query q. Rows: whole tiles.
  const uint4* mask;
  int mask_rows;
};

#define ARGUMENTS MaskedArguments
#include "bf16_prefill.cu"
