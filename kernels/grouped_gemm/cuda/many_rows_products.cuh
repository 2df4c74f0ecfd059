// Multiplies 64 rows of the weight by a tile's rows, and stores the outputs: the role of each of two warpgroups.

#pragma once

#include "many_rows_tiles.cuh"

template <int ROWS>
struct Rows {};

// The first 64 rows of the weight by ROWS rows of activations, over 16 inputs, both in shared memory.
#define MULTIPLY(ROWS, SUMS, A, B, ADD)                                                                         \
  template <int N>                                                                                              \
  __device__ __forceinline__ void multiply_bf16(Rows<ROWS>, float (&d)[N], u64 a, u64 b, int accumulate) {      \
    asm volatile(                                                                                               \
        "{\n .reg .pred p;\n setp.ne.b32 p, %" #ADD ", 0;\n"                                                    \
        "wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" NAMES_##SUMS "}, %" #A ", %" #B         \
        ", p, 1, 1, 0, 0;\n}"                                                                                   \
        : BIND_##SUMS(d, 0) : "l"(a), "l"(b), "r"(accumulate));                                                 \
  }
MULTIPLY(16, 8, 8, 9, 10)
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(48, 24, 24, 25, 26)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(80, 40, 40, 41, 42)
MULTIPLY(96, 48, 48, 49, 50)
MULTIPLY(112, 56, 56, 57, 58)
MULTIPLY(128, 64, 64, 65, 66)
MULTIPLY(144, 72, 72, 73, 74)
MULTIPLY(160, 80, 80, 81, 82)
MULTIPLY(176, 88, 88, 89, 90)
MULTIPLY(192, 96, 96, 97, 98)
MULTIPLY(208, 104, 104, 105, 106)
MULTIPLY(224, 112, 112, 113, 114)
MULTIPLY(240, 120, 120, 121, 122)
MULTIPLY(256, 128, 128, 129, 130)
#undef MULTIPLY

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

template <bool GATED, int MOST_ROWS>
struct Consumer {
  // Outputs of a CTA, and of this warpgroup.
  static constexpr int OUTPUTS = GATED ? LINES / 2 : LINES, OWN = OUTPUTS / CONSUMERS;
  Shared<MOST_ROWS>& shared;
  const Arguments& given;
  // 0 or 1, the same for a whole warp, as the compiler knows: so descriptors stay in uniform registers.
  int half;
  Turn<Shared<MOST_ROWS>::STAGES> turn;

  __device__ __forceinline__ void run() {
    Tiles<OUTPUTS, MOST_ROWS> tiles{shared, given};
    Tile tile;
    while (tiles.next(tile)) {
      float sums[MOST_ROWS / 2];
      multiply<MOST_ROWS>(sums, tile.rows);
      store(sums, tile);
    }
  }

  // rows: at most ROWS.
  template <int ROWS>
  __device__ __forceinline__ void multiply(float (&sums)[MOST_ROWS / 2], int rows) {
    if constexpr (ROWS > ROWS_STEP) {
      if (rows < ROWS) return multiply<ROWS - ROWS_STEP>(sums, rows);
    }
    multiply<ROWS>(sums);
  }

  template <int ROWS>
  __device__ __forceinline__ void multiply(float (&sums)[MOST_ROWS / 2]) {
    int before = 0;
#pragma unroll 1
    for (int block = 0; block < given.blocks; block++) {
      wait(&shared.full[turn.stage], turn.phase);
      u64 weight = descriptor<1>(shared_address(shared.weight[turn.stage]) + half * (CONSUMER_LINES * INPUT_BYTES));
      u64 x = descriptor<1>(shared_address(shared.x[turn.stage]));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < INPUTS / 16; step++) multiply_bf16(Rows<ROWS>{}, sums, weight + step * 2, x + step * 2, block + step > 0);
      wgmma_commit();
      // The products of the block before have read their stage.
      wgmma_wait<1>();
      if (block) release(before);
      before = turn.stage;
      turn.advance();
    }
    wgmma_wait<0>();
    pin(sums);
    release(before);
  }

  // Tells that the stage may be written again, by this CTA's copies and by the neighbour's.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 < CTAS) arrive_at(&shared.empty[stage], threadIdx.x % 32);
  }

  // Turns sums over through shared memory, 64 rows of activations at a time, in which a row's outputs lie side by side.
  __device__ __forceinline__ void store(const float (&sums)[MOST_ROWS / 2], const Tile& tile) const {
    constexpr int PIECES = OWN / 8;
    u32 buffer = shared_address(shared.out[half]);
    int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % 32, warp = thread / 32;
    int first_output = tile.first_output + half * OWN;
#pragma unroll
    for (int part = 0; part < MOST_ROWS / 64; part++) {
      if (part * 64 >= tile.rows) break;
      const float* own = sums + part * 32;
      meet();
      if constexpr (GATED) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          u32 words[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float* from = own + (j + i) * 4;
            words[i] = pack_bf16(gated(from[0], from[2]), gated(from[1], from[3]));
          }
          int row = j * 8 + lane;
          store_transposed(buffer + row * 128 + ((warp ^ (row & 7)) * 16), words[0], words[1], words[2], words[3]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* from = own + j * 4;
          int row = (j + lane / 16) * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
          store_transposed(buffer + row * 128 + ((piece ^ (row & 7)) * 16), pack_bf16(from[0], from[1]),
                           pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7]));
        }
      }
      meet();
#pragma unroll
      for (int at = thread; at < 64 * PIECES; at += WARPGROUP) {
        int row = at / PIECES, piece = at % PIECES, output = first_output + piece * 8;
        uint4 value = load_shared(buffer + row * 128 + ((piece ^ (row & 7)) * 16));
        long long target = tile.first_row + part * 64 + row;
        if (target < tile.stop && output < given.outputs) store_global(given.out + target * given.outputs + output, value);
      }
    }
  }
  // All threads of this warpgroup meet.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory"); }
};
