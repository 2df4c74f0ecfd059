// Attention over a prompt of bf16 to the keys that each query has chosen, for Hopper (sm_90a): dense, with a mask.
//
// As `bf16_prefill.cu`, with 16 bytes more of a query and step: bits of the keys that count, copied next to the step's keys. A thread tests
// 64 of them a step, 2 instructions each. Blocks in which no bit is set are computed too.

#define MASKED_KEYS true
#include "tile_producer.cuh"

struct MaskedArguments {
  Inputs inputs;
  // The tiles of one prompt, those with most keys first.
  const Tile* tiles;
  // [steps, mask_rows, 128 bits]: bit i of row q and step s is key s * 128 + i of query q. Rows: whole tiles.
  const uint4* mask;
  int mask_rows;
};

#define ARGUMENTS MaskedArguments
#include "bf16_prefill.cu"
