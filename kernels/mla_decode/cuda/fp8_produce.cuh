// Copies latents and queries into shared memory.

#pragma once

#include "fp8_arguments.cuh"

struct Shared {
  u8 query[TILE_BYTES];
  u8 tiles[STAGES][TILE_BYTES];
  u8 probabilities[2][HEADS * BLOCK];
  float query_scale[HEADS];
  float largest[2][HEADS];
  float alpha[HEADS];
  float total[2][HEADS];
  u64 full[STAGES];
  u64 empty[STAGES];
  // Rows of the tile that are heads.
  int heads;
};

// Copies the first `tokens` tokens of a request's last block and clears the rest, whose probabilities are zero.
__device__ __forceinline__ void copy_part(u8* tile, const u8* source, int tokens) {
  u32 base = shared_address(tile);
#pragma unroll 3
  for (int i = 0; i < TILE_BYTES / 16 / PRODUCERS; i++) {
    int piece = i * PRODUCERS + threadIdx.x - CONSUMERS, token = piece / (WIDTH / 16), column = piece % (WIDTH / 16);
    u32 latent = (column / 8) * CHUNK_BYTES + token * 128 + ((column % 8) ^ (token & 7)) * 16;
    u32 rope = ROPE_OFFSET + token * 64 + ((column % 4) ^ ((token >> 1) & 3)) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(base + (column < LATENT / 16 ? latent : rope)),
                 "l"(source + piece * 16), "r"(token < tokens ? 16 : 0) : "memory");
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async_proxy();
}

__device__ __forceinline__ void copy_whole(u8* tile, const Arguments& given, int block, u64* full) {
  arrive_and_expect(full, TILE_BYTES);
#pragma unroll
  for (int chunk = 0; chunk < LATENT / 128; chunk++)
    copy_box(tile + chunk * CHUNK_BYTES, given.latents, chunk * 128, block * BLOCK, full);
  copy_box(tile + ROPE_OFFSET, given.keys, LATENT, block * BLOCK, full);
}

__device__ __forceinline__ void produce(Shared& shared, const Arguments& given, const Part& part) {
  int copied = 0;
  for (int index = part.begin; index < part.end; index++) {
    Piece piece = given.work.pieces[index];
    int length = given.work.lengths[piece.request];
    const int* blocks = given.work.block_table + (long long)piece.request * given.work.table_stride;
    for (int block = 2 * piece.first; block < 2 * piece.last; block++, copied++) {
      int stage = copied % STAGES, tokens = length - block * BLOCK, stored = tokens > 0 ? blocks[block] : 0;
      wait(&shared.empty[stage], (copied / STAGES & 1) ^ 1);
      if (tokens >= BLOCK && threadIdx.x == CONSUMERS) {
        copy_whole(shared.tiles[stage], given, stored, &shared.full[stage]);
      } else {
        if (tokens < BLOCK) copy_part(shared.tiles[stage], given.pool + (long long)stored * TILE_BYTES, tokens);
        arrive(&shared.full[stage]);
      }
    }
  }
}

// Quantizes 64 queries of 576 bf16 values to e4m3, with a scale for each and zeros after the last head. A warp does 8. The loop
// is not unrolled, like all code that runs once a piece: fetching code that is not in the instruction cache costs more than it
// computes.
__device__ __forceinline__ void load_query(Shared& shared, const u32* query) {
  int first = threadIdx.x / 32 * 8, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = first; head < first + 8; head++) {
    const u32* source = query + head * (WIDTH / 2) + lane;
    u32 pairs[WIDTH / 64];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) pairs[i] = head < shared.heads ? source[i * 32] : 0;
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) {
      largest = fmaxf(largest, fabsf(__uint_as_float(pairs[i] << 16)));
      largest = fmaxf(largest, fabsf(__uint_as_float(pairs[i] & 0xFFFF0000u)));
    }
#pragma unroll
    for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    float scale = fmaxf(largest, SMALLEST_MAGNITUDE) * (1.0f / LARGEST_E4M3), inverse = __fdividef(1.0f, scale);
    if (lane == 0) shared.query_scale[head] = scale;
    // 64 bytes of a row at a time: half of a 128-byte line, or the 64-byte line of the key's part.
    u8* even = shared.query + head * 128 + (lane / 8 ^ head & 7) * 16 + lane % 8 * 2;
    u8* odd = shared.query + head * 128 + (lane / 8 + 4 ^ head & 7) * 16 + lane % 8 * 2;
    u8* rope = shared.query + ROPE_OFFSET + head * 64 + (lane / 8 ^ head >> 1 & 3) * 16 + lane % 8 * 2;
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) {
      float low = __uint_as_float(pairs[i] << 16), high = __uint_as_float(pairs[i] & 0xFFFF0000u);
      u8* target = i == LATENT / 64 ? rope : (i % 2 ? odd : even) + i / 2 * CHUNK_BYTES;
      *reinterpret_cast<unsigned short*>(target) = pack_e4m3(low * inverse, high * inverse);
    }
  }
}
