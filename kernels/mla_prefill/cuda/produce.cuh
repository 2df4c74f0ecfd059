// Copies queries, keys and values into shared memory: the role of one thread, which has few registers.

#pragma once

#include "tiles.cuh"

struct Producer {
  Shared& shared;
  const Arguments& given;
  // Units, blocks of keys and blocks of values copied so far.
  int units = 0, keys = 0, values = 0;

  __device__ __forceinline__ void copy_queries(const Unit& unit) {
#pragma unroll
    for (int half = 0; half < CONSUMERS; half++) {
      u64* full = &shared.query_full[half];
      wait(&shared.query_empty[half], (units & 1) ^ 1);
      shared.tile[half] = unit.tile;
      shared.head[half] = unit.head;
      if (!unit.tile.queries) {
        arrive(full);
        continue;
      }
      arrive_and_expect(full, QUERY_BYTES);
#pragma unroll
      for (int chunk = 0; chunk < KEY_CHUNKS; chunk++)
        copy_box(shared.query[half] + chunk * QUERY_CHUNK_BYTES, given.query_boxes, unit.head * given.query_head + chunk * CHUNK * 2,
                 unit.tile.first_query + half * HALF_QUERIES, full);
    }
    units++;
  }

  template <int CHUNKS>
  __device__ __forceinline__ void copy_block(u8* target, const TensorMap& map, int column, int row, u64* full, u64* empty, int number) {
    wait(empty, (number / STAGES & 1) ^ 1);
    arrive_and_expect(full, CHUNKS * CHUNK_BYTES);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      copy_box(target + chunk * CHUNK_BYTES, map, column + chunk * CHUNK * 2, row, full);
  }
  __device__ __forceinline__ void copy_keys(int head, int row) {
    int stage = keys % STAGES;
    copy_block<KEY_CHUNKS>(shared.key[stage], given.key_boxes, head * given.key_head, row, &shared.key_full[stage],
                           &shared.key_empty[stage], keys++);
  }
  __device__ __forceinline__ void copy_values(int head, int row) {
    int stage = values % STAGES;
    copy_block<VALUE_CHUNKS>(shared.value[stage], given.value_boxes, head * given.value_head, row, &shared.value_full[stage],
                             &shared.value_empty[stage], values++);
  }

  // In the order in which consumers need them: a prompt's last keys first. The next unit is taken while this one is computed.
  __device__ __forceinline__ void run() {
    int index = blockIdx.x;
    while (true) {
      Unit unit = unit_at(given, index);
      copy_queries(unit);
      if (!unit.tile.queries) return;
      int blocks = blocks_of(unit.tile), row = unit.tile.first_key + (blocks - 1) * KEYS;
      copy_keys(unit.head, row);
#pragma unroll 1
      for (int left = blocks; left > 0; left--, row -= KEYS) {
        if (left > 1) copy_keys(unit.head, row - KEYS);
        copy_values(unit.head, row);
        if (left == blocks) index = gridDim.x + atomicAdd(given.taken, 1);
      }
    }
  }
};
