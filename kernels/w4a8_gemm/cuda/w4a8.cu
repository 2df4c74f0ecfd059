// The experts' products (expert_products.cuh) of weights with a scale for each output and 128 inputs.

#include "expert_products.cuh"

ALL_TILINGS(1)
