// A warp's weights on their way to it: all that it multiplies, of both products, one after the other through a ring in
// shared memory.
//
// A lane copies what it reads itself, so that no thread waits for another one. Weights of the last product are in the ring
// before the rows that they multiply are known.

#pragma once

#include "few_work.cuh"

// A strip's weights of a group of inputs, a lane's two pieces of 16 bytes and the scales of its two outputs, and how
// many of these a warp's ring has.
constexpr int PIECES_BYTES = 32 * 16, SLOT_BYTES = 2 * PIECES_BYTES + 32 * 4, SLOTS = 8;

__device__ __forceinline__ void copy_piece(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_word(u32 to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until no more than PENDING of the latest groups of copies are on their way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

template <int STRIPS>
struct Feed {
  // A stage has a group of inputs of all strips of a unit.
  static constexpr int STAGES = SLOTS / STRIPS, STAGE_BYTES = STRIPS * SLOT_BYTES;
  const Weight &first, &last;
  const Work<STRIPS> work;
  // The chosen experts, in shared memory.
  const int* touched;
  // Where this lane's first pieces lie.
  u8* ring;
  int warp;
  // This lane's pieces of the next group, from there to its scales, bytes to the group after that, and groups that are left
  // of this unit.
  const u8* at[STRIPS];
  int to_scales[STRIPS], to_next, left, stage, round, phase;

  __device__ __forceinline__ Feed(const Weight& first, const Weight& last, const Work<STRIPS>& work, const int* touched,
                                  u8* rings, int warp)
      : first(first), last(last), work(work), touched(touched),
        ring(rings + warp * SLOTS * SLOT_BYTES + threadIdx.x % 32 * 16), warp(warp), to_next(0), left(0), stage(0),
        round(0), phase(0) {
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) copy_next();
  }

  // How many groups a part has, every eighth one: warps of a team then read what lies close together.
  __device__ __forceinline__ static int groups_of(int part, int groups) { return (groups - part + PARTS - 1) / PARTS; }

  __device__ __forceinline__ u8* place(int at_stage, int strip) const {
    return ring + at_stage * STAGE_BYTES + strip * SLOT_BYTES;
  }

  // Copies the next stage into the place of the one that has just been used, if there is a next one.
  __device__ __forceinline__ void copy_next() {
    if (!left && phase < 2) find();
    if (left) {
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++) {
        u32 to = shared_address(place(stage, strip));
        copy_piece(to, at[strip]);
        copy_piece(to + PIECES_BYTES, at[strip] + WEIGHT_BYTES / 2);
        copy_word(to + 2 * PIECES_BYTES - threadIdx.x % 32 * 12, at[strip] + to_scales[strip]);
        at[strip] += to_next;
      }
      left--;
    }
    end_copies();
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

 private:
  __device__ __forceinline__ void find() {
    int part = warp % PARTS;
    for (; phase == 0 && !left; round++) {
      int number = work.first_unit(warp / PARTS, round);
      if (number < work.first_units()) start(first, number, work.first, part, groups_of(part, first.groups), PARTS);
      else phase = 1, round = -1;
    }
    if (left) return;
    Range units = work.last_units();
    int number = work.last_unit(units, warp, round++);
    if (number < units.end) start(last, number, work.last, 0, last.groups, 1);
    else phase = 2;
  }

  __device__ __forceinline__ void start(const Weight& weight, int number, const Divisor& each, int begin, int groups,
                                        int step) {
    Unit unit = work.unit(number, each);
    int expert = touched[unit.place], lane = threadIdx.x % 32;
    left = groups, to_next = step * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < STRIPS; i++) {
      // After an expert's last strip, that strip is read again.
      int strip = min(unit.strip + i, weight.strips() - 1), tile = expert * weight.output_tiles + strip / TILE_STRIPS;
      int within = strip % TILE_STRIPS;
      at[i] = weight.tiles + (tile * (long long)weight.groups + begin) * TILE_BYTES + within * PIECES_BYTES + lane * 16;
      to_scales[i] = WEIGHT_BYTES + within * (STRIP * 2 - PIECES_BYTES) + lane / 4 * 4 - lane * 16;
    }
  }
};
