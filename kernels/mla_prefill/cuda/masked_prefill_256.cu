// Attention over a prompt of bf16 to the keys that each query has chosen, with keys and values 256 wide (GLM-5), for Hopper (sm_90a):
// `bf16_prefill_256.cu` with a mask. A step has the keys of half a block of the mask.

#define OWN_CHANNELS 192
#define VALUE_CHANNELS 256
#define STEP_KEYS 64
#include "masked_prefill.cu"
