// Multiplies 64 rows by a tile's outputs: the role of each of two warpgroups.

#pragma once

#include "many_rows_tiles.cuh"
#include "multiply.cuh"

// Stores a warp's four 8 x 8 fragments as rows of 16 bytes. Each eight lanes have the places of one fragment's rows.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Copies a box from shared memory, as far as it lies within the map's rows.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row, const void* source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(column), "r"(row), "r"(shared_address(source)) : "memory");
}

constexpr int OUT_BOX_BYTES = HALF_ROWS * 128;

template <int WIDTH, bool SORTED>
struct Consumer {
  using Memory = Shared<WIDTH>;
  // Outputs that are multiplied at once, and how many such parts a tile has.
  static constexpr int PART = Memory::WEIGHT_BOX, PARTS = WIDTH / PART;
  Memory& shared;
  const Arguments& given;
  // 0 or 1, the same for a whole warp, as the compiler knows: so descriptors stay in uniform registers.
  int half;
  // The ring's places of the next block to multiply, and of the next one to add.
  Turn<Memory::STAGES> issued, added;

  // Tells that the stage may be written again, by this CTA's copies and by the neighbour's.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 < CTAS) arrive_at(&shared.empty[stage], threadIdx.x % 32);
  }

  // Issues the products of a block of 128 inputs with a part of the tile's outputs. The block's bytes have arrived.
  __device__ __forceinline__ void issue(float (&products)[PART / 2], int stage, int part) const {
    u64 x = descriptor<1>(shared_address(shared.x[stage]) + half * (HALF_ROWS * BLOCK));
    u64 weight = descriptor<1>(shared_address(shared.weight[stage]) + part * (PART * BLOCK));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK / 32; step++) multiply(products, x + step * 2, weight + step * 2, step > 0);
    wgmma_commit();
  }

  // Scales and adds these products, once no more than PENDING ones are being computed. With the last part the stage is free.
  template <int PENDING>
  __device__ __forceinline__ void add(float (&sums)[WIDTH / 2], float (&products)[PART / 2], int part) {
    const float* of_rows = shared.x_scales[added.stage] + first_row();
    float of_weight = shared.weight_scales[added.stage][part], scales[2] = {of_rows[0] * of_weight, of_rows[8] * of_weight};
    // Loaded before this warp lets go of the stage, since an arrival does not wait for loads.
    pin(scales);
    wgmma_wait<PENDING>();
    pin(products);
    if (part == PARTS - 1) {
      release(added.stage);
      added.advance();
    }
#pragma unroll
    for (int i = 0; i < PART / 2; i++)
      sums[part * PART / 2 + i] = fmaf(products[i], scales[i / 2 % 2], sums[part * PART / 2 + i]);
  }

  // Issues the products of the next block, of a tile of one part.
  __device__ __forceinline__ void issue_next(float (&products)[PART / 2]) {
    wait(&shared.full[issued.stage], issued.phase);
    issue(products, issued.stage, 0);
    issued.advance();
  }

  // Multiplies four blocks. While one is added, the next one is multiplied.
  __device__ __forceinline__ void multiply_four(float (&sums)[WIDTH / 2]) {
    float even[PART / 2], odd[PART / 2];
    issue_next(even);
    issue_next(odd);
    add<1>(sums, even, 0);
    issue_next(even);
    add<1>(sums, odd, 0);
    issue_next(odd);
    add<1>(sums, even, 0);
    add<0>(sums, odd, 0);
  }

  // Multiplies one block for a wide tile, whose sums leave no registers for the products of two. While one warpgroup adds, the
  // other multiplies.
  __device__ __forceinline__ void multiply_wide(float (&sums)[WIDTH / 2]) {
    float products[PART / 2];
    wait(&shared.full[added.stage], added.phase);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      issue(products, added.stage, part);
      add<0>(sums, products, part);
    }
  }

  // The copy engine stores the sums, in the background.
  __device__ __forceinline__ void store(const float (&sums)[WIDTH / 2], const Tile& tile) const {
    u8* out = shared.out[half];
    int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % 32, row = thread / 32 * 16 + lane % 16;
    // Wait until the sums before these have left.
    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    meet();
#pragma unroll
    for (int pair = 0; pair < WIDTH / 16; pair++) {
      const float* from = sums + pair * 8;
      int chunk = pair % 4 * 2 + lane / 16;
      u32 words[4] = {pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7])};
      store_matrices(shared_address(out) + pair / 4 * OUT_BOX_BYTES + row * 128 + (chunk ^ (row & 7)) * 16, words);
    }
    fence_async_proxy();
    meet();
    if (thread == 0) {
#pragma unroll
      for (int box = 0; box < WIDTH / 64; box++)
        store_box(given.out, (tile.first_output + box * 64) * 2, tile.first_row + half * HALF_ROWS, out + box * OUT_BOX_BYTES);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  // All threads of this warpgroup meet.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory"); }

  __device__ __forceinline__ void run() {
    Tiles<WIDTH, SORTED> tiles{given};
    Tile tile;
    while (tiles.next(tile)) {
      float sums[WIDTH / 2];
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) sums[i] = 0.0f;
#pragma unroll 1
      for (int left = blocks_of<WIDTH>(given.blocks); left > 0; left -= STEP<WIDTH>) {
        if constexpr (PARTS == 1) multiply_four(sums);
        else multiply_wide(sums);
      }
      store(sums, tile);
    }
    // Shared memory must outlive the copies from it.
    if (threadIdx.x % WARPGROUP == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  // The first of the two rows of which this thread has sums; the other one is 8 further on.
  __device__ __forceinline__ int first_row() const {
    return half * HALF_ROWS + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
  }
};
