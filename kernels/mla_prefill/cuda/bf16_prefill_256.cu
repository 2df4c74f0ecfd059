// Attention over ragged prompts of bf16 with keys and values 256 wide (GLM-4.7-Flash), for Hopper (sm_90a).
//
// Shared memory has room for steps of 64 keys, and the sums of 256 channels leave no registers for queries: the products of scores
// read both operands from shared memory, 4 KB for 64 x 64 x 16, which is all that it can deliver while they run. A step takes
// 2 * 128 * 64 * 512 FLOPs, 2,048 cycles of the tensor cores.

#define OWN_CHANNELS 192
#define VALUE_CHANNELS 256
#define STEP_KEYS 64
#include "bf16_prefill.cu"
