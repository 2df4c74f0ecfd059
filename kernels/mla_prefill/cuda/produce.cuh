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

  // A step's rows are one box of all of them, or one of each block that is there.
  template <int BOXES>
  __device__ __forceinline__ static bool are_all_there(const int (&rows)[BOXES]) {
    return BOXES == 1 || rows[BOXES - 1] < NO_BLOCK;
  }
  // Waits until the stage is free, and has its barrier count the bytes of CHUNKS chunks and MORE.
  template <int CHUNKS, int MORE, int BOXES>
  __device__ __forceinline__ static void expect(const int (&rows)[BOXES], u64* full, u64* empty, int number) {
    wait(empty, (number / STAGES & 1) ^ 1);
    arrive_and_expect(full, are_all_there(rows) ? CHUNKS * CHUNK_BYTES + MORE : CHUNKS * CHUNK_BYTES / BOXES + MORE);
  }
  // A missing block keeps what lies in shared memory.
  template <int CHUNKS, int BOXES>
  __device__ __forceinline__ static void copy_chunks(u8* target, const TensorMap& map, int column, const int (&rows)[BOXES], u64* full) {
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
      if (box && !are_all_there(rows)) break;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        copy_box(target + chunk * CHUNK_BYTES + box * (CHUNK_BYTES / BOXES), map, column + chunk * CHUNK * 2, rows[box], full);
    }
  }
  // Each head's own channels, then those that all heads share.
  template <int BOXES>
  __device__ __forceinline__ void copy_keys(int head, const int (&rows)[BOXES]) {
    int stage = keys % STAGES;
    u64* full = &shared.key_full[stage];
    expect<KEY_CHUNKS, MASK_BYTES>(rows, full, &shared.key_empty[stage], keys);
    copy_chunks<OWN_CHUNKS>(shared.key[stage], given.own_boxes, head * given.own_head, rows, full);
    copy_chunks<KEY_CHUNKS - OWN_CHUNKS>(shared.key[stage] + OWN_CHUNKS * CHUNK_BYTES, given.shared_boxes, 0, rows, full);
    keys++;
  }
  template <int BOXES>
  __device__ __forceinline__ void copy_values(int head, const int (&rows)[BOXES]) {
    int stage = values % STAGES;
    u64* full = &shared.value_full[stage];
    expect<VALUE_CHUNKS, 0>(rows, full, &shared.value_empty[stage], values);
    copy_chunks<VALUE_CHUNKS>(shared.value[stage], given.value_boxes, head * given.value_head, rows, full);
    values++;
  }
};
