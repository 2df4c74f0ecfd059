// Attention over ragged prompts of bf16 with keys and values 192 wide (GigaChat3), for Hopper (sm_90a).
//
// A step has 64 keys: the sums of 192 channels leave registers for the scores of no more, besides queries.

#define OWN_CHANNELS 128
#define VALUE_CHANNELS 192
#define STEP_KEYS 64
#include "bf16_prefill.cu"
