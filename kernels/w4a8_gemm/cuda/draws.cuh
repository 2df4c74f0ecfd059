// How CTAs share out tiles: each draws one number after another, from a counter that is zero before and after the kernel.
//
// A CTA's first number is its own, and it draws once for each of its tiles: in all, as many times as there are tiles.

#pragma once

#include "../../cuda/hopper.cuh"

// Groups of inputs before a tile's end at which a number is drawn: the answer takes a microsecond or two. Drawn earlier, a tile
// would wait for a slow CTA while others have none left.
constexpr int DRAWN_AHEAD = 4;

template <int THREADS>
struct Draws {
  int* drawn;
  // In shared memory: a number is read while the next one may be written.
  int (&numbers)[2];
  int draws, parity, found;

  // draws: whether this thread draws, as one of the THREADS does.
  __device__ __forceinline__ Draws(int* drawn, int (&numbers)[2], bool draws)
      : drawn(drawn), numbers(numbers), draws(draws), parity(0), found(0) {}

  __device__ __forceinline__ void draw() {
    if (draws) found = atomicAdd(drawn, 1);
  }

  // The number that was drawn. tiles: how many all CTAs make together.
  __device__ __forceinline__ int number(int tiles) {
    if (draws) {
      numbers[parity] = gridDim.x + found;
      if (found == tiles - 1) *drawn = 0;
    }
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    int next = numbers[parity];
    parity ^= 1;
    return next;
  }
};
