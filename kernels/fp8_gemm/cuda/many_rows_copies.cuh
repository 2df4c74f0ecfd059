// Copies blocks of 128 inputs and their scales into shared memory: the roles of one thread and of one warp.

#pragma once

#include "many_rows_tiles.cuh"

template <int WIDTH, bool SORTED>
struct Copier {
  using Memory = Shared<WIDTH>;
  Memory& shared;
  const Arguments& given;

  __device__ __forceinline__ void copy_operands() const {
    Tiles<WIDTH, SORTED> tiles{given};
    Turn<Memory::STAGES> turn;
    Tile tile;
    while (tiles.next(tile)) {
      int weight_row = tile.expert * given.outputs + tile.first_output;
#pragma unroll 1
      for (int block = 0; block < blocks_of<WIDTH>(given.blocks); block++, turn.advance()) {
        u64* full = &shared.full[turn.stage];
        wait(&shared.empty[turn.stage], turn.phase ^ 1);
        arrive_and_expect(full, X_BYTES + Memory::WEIGHT_BYTES);
        copy<ROWS, HALF_ROWS>(shared.x[turn.stage], given.x, block, tile.first_row, full, !Tiles<WIDTH, SORTED>::BELOW);
        copy<WIDTH, Memory::WEIGHT_BOX>(shared.weight[turn.stage], given.weight, block, weight_row, full, tile.shares_weight);
      }
    }
  }

  __device__ __forceinline__ void copy_scales() const {
    Tiles<WIDTH, SORTED> tiles{given};
    Turn<Memory::STAGES> turn;
    Tile tile;
    int lane = threadIdx.x % 32, weight_blocks = ceiling(given.outputs, BLOCK);
    while (tiles.next(tile)) {
      int row = tile.first_row + lane * 4;
      const float* of_rows = given.x_scales + row;
      // Where there are no outputs any scale will do.
      int of_outputs = min(tile.first_output / BLOCK + lane % Memory::WEIGHT_SCALES, weight_blocks - 1);
      const float* of_weight = given.weight_scales + (long long)(tile.expert * weight_blocks + of_outputs) * given.blocks;
#pragma unroll 1
      for (int block = 0; block < blocks_of<WIDTH>(given.blocks); block++, turn.advance(), of_rows += given.scale_stride) {
        wait(&shared.empty[turn.stage], turn.phase ^ 1);
        copy_or_clear<16>(&shared.x_scales[turn.stage][lane * 4], of_rows, row < given.rows && block < given.blocks);
        if (lane < Memory::WEIGHT_SCALES)
          copy_or_clear<4>(&shared.weight_scales[turn.stage][lane], of_weight + block, block < given.blocks);
        arrive_once_copied(&shared.full[turn.stage]);
      }
    }
  }

  // Rows of 128 bytes, in boxes. If the neighbour needs the same ones, each CTA copies one box of two to both.
  template <int COUNT, int BOX>
  __device__ __forceinline__ static void copy(u8* target, const TensorMap& map, int block, int row, u64* full, bool shared_by_all) {
    int rank = blockIdx.x % CTAS;
    if (COUNT == CTAS * BOX && shared_by_all) {
      copy_box_to<CTAS>(target + rank * BOX * BLOCK, map, block * BLOCK, row + rank * BOX, full, (1 << CTAS) - 1);
      return;
    }
#pragma unroll
    for (int at = 0; at < COUNT; at += BOX) copy_box(target + at * BLOCK, map, block * BLOCK, row + at, full);
  }

  // Copies in the background, by this thread. If `copied` is false, the target gets zeros, and nothing is read.
  template <int BYTES>
  __device__ __forceinline__ static void copy_or_clear(void* target, const void* source, bool copied) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(shared_address(target)), "l"(source), "n"(BYTES), "r"(copied ? BYTES : 0) : "memory");
  }
  // The barrier counts this thread once its copies up to here are there.
  __device__ __forceinline__ static void arrive_once_copied(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
  }
};
