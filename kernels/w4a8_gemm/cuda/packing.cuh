// How the experts' weights are packed (weight.py).

#pragma once

#include "../../cuda/hopper.cuh"

constexpr int TILE_OUTPUTS = 64, GROUP_INPUTS = 128, WEIGHT_BYTES = TILE_OUTPUTS * GROUP_INPUTS / 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + TILE_OUTPUTS * 2;
constexpr int MOST_EXPERTS = 512;
