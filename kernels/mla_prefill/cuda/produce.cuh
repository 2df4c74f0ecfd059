// Copies queries, keys and values into shared memory: the role of one thread, which has few registers.

#pragma once

#include "tiles.cuh"

struct Copier {
  Shared& shared;
  const Inputs& given;
  // Units, and steps of keys and of values, copied so far.
  int units = 0, keys = 0, values = 0;

  __device__ __forceinline__ void copy_queries(const Unit& unit) {
#pragma unroll
    for (int half = 0; half < CONSUMERS; half++) {
      u64* full = &shared.query_full[half];
      wait(&shared.query_empty[half], (units & 1) ^ 1);
      shared.unit[half] = unit;
      if (!unit.steps) {
        arrive(full);
        continue;
      }
      arrive_and_expect(full, QUERY_BYTES);
#pragma unroll
      for (int chunk = 0; chunk < KEY_CHUNKS; chunk++)
        copy_box(shared.query[half] + chunk * QUERY_CHUNK_BYTES, given.query_boxes, unit.head * given.query_head + chunk * CHUNK * 2,
                 unit.first_query + half * HALF_QUERIES, full);
    }
    units++;
  }

  // A step's rows: one box of all, or one of each block that is there. A missing block keeps what lies in shared memory.
  template <int CHUNKS, int BOXES>
  __device__ __forceinline__ void copy_step(u8* target, const TensorMap& map, int column, const int (&rows)[BOXES], u64* full, u64* empty, int number) {
    wait(empty, (number / STAGES & 1) ^ 1);
    bool all = BOXES == 1 || rows[BOXES - 1] < NO_BLOCK;
    arrive_and_expect(full, all ? CHUNKS * CHUNK_BYTES : CHUNKS * CHUNK_BYTES / BOXES);
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
      if (box && !all) break;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        copy_box(target + chunk * CHUNK_BYTES + box * (CHUNK_BYTES / BOXES), map, column + chunk * CHUNK * 2, rows[box], full);
    }
  }
  template <int BOXES>
  __device__ __forceinline__ void copy_keys(int head, const int (&rows)[BOXES]) {
    int stage = keys % STAGES;
    copy_step<KEY_CHUNKS>(shared.key[stage], given.key_boxes, head * given.key_head, rows, &shared.key_full[stage],
                          &shared.key_empty[stage], keys);
    keys++;
  }
  template <int BOXES>
  __device__ __forceinline__ void copy_values(int head, const int (&rows)[BOXES]) {
    int stage = values % STAGES;
    copy_step<VALUE_CHUNKS>(shared.value[stage], given.value_boxes, head * given.value_head, rows, &shared.value_full[stage],
                            &shared.value_empty[stage], values);
    values++;
  }
};
