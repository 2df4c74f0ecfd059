// Adds up a tile's sums over turns and over the CTAs of a cluster, and stores them: what warpgroups that multiply do last.

#pragma once

#include "few_rows_tiles.cuh"

__device__ __forceinline__ void add(float4& sum, float4 other) {
  sum.x += other.x;
  sum.y += other.y;
  sum.z += other.z;
  sum.w += other.w;
}

template <int ROWS, int OUTPUTS>
struct Adder {
  using Of = Shape<ROWS, OUTPUTS>;
  Shared<ROWS, OUTPUTS>& shared;
  const Arguments& given;
  Share<ROWS, OUTPUTS> own;

  // All threads that multiply meet.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, %0;" ::"n"(Of::CONSUMERS) : "memory"); }

  static __device__ __forceinline__ float4 part(const float (&total)[ROWS / 2], int j) {
    return make_float4(total[j * 4], total[j * 4 + 1], total[j * 4 + 2], total[j * 4 + 3]);
  }

  // Stores 8 rows, the j-th ones, as bf16 in shared memory, where a row's outputs are contiguous.
  __device__ __forceinline__ void stage_rows(u8* rows, int j, float4 sum) const {
    int lane = threadIdx.x % 32, output = threadIdx.x % Of::TURN / 32 * 16 + lane / 8 % 2 * 8;
    if (OUTPUTS % GROUP_OUTPUTS && output >= OUTPUTS) return;
    u32 address = shared_address(rows) + (j * 8 + lane % 8) * Of::ROW_BYTES + output * 2;
    store_transposed(address, pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }

  // Partial sums lie where the ring was. `turns` has those of all turns but the first. `ranks` has those that arrive from all
  // CTAs, this one included, for this CTA's 8 of each 8 * RANKS rows.
  template <int RANKS>
  struct Sums {
    static constexpr int LARGEST = (Of::EIGHTS + RANKS - 1) / RANKS;
    float4 turns[Of::TURNS - 1][Of::EIGHTS][Of::TURN];
    float4 ranks[RANKS][LARGEST][Of::TURN];
    u8 rows[ROWS * Of::ROW_BYTES];
  };

  // Adds this CTA's sums over its turns, and sends them to the CTAs that add up the ranks.
  template <int RANKS>
  __device__ __forceinline__ void send_sums(const float (&total)[ROWS / 2], Sums<RANKS>& sums) const {
    int thread = threadIdx.x % Of::TURN;
    if (own.turn() > 0) {
#pragma unroll
      for (int j = 0; j < Of::EIGHTS; j++) sums.turns[own.turn() - 1][j][thread] = part(total, j);
    }
    meet();
    // Wait until the rings of all CTAs are free.
    cluster_wait();
    if (own.turn() > 0) return;
#pragma unroll
    for (int j = 0; j < Of::EIGHTS; j++) {
      float4 sum = part(total, j);
#pragma unroll
      for (int other = 0; other < Of::TURNS - 1; other++) add(sum, sums.turns[other][j][thread]);
      send(&sums.ranks[own.rank][j / RANKS][thread], sum, &shared.summed, j % RANKS);
    }
  }

  // Adds up this CTA's rows, which its turns share.
  template <int RANKS>
  __device__ __forceinline__ void add_up(Sums<RANKS>& sums) const {
#pragma unroll
    for (int i = 0; i < (Sums<RANKS>::LARGEST + Of::TURNS - 1) / Of::TURNS; i++) {
      int at = own.turn() + i * Of::TURNS, j = at * RANKS + own.rank;
      if (j >= Of::EIGHTS) break;
      float4 sum = sums.ranks[0][at][threadIdx.x % Of::TURN];
#pragma unroll
      for (int rank = 1; rank < RANKS; rank++) add(sum, sums.ranks[rank][at][threadIdx.x % Of::TURN]);
      stage_rows(sums.rows, j, sum);
    }
  }

  // Writes this CTA's rows to memory, 16 bytes a thread.
  template <int RANKS>
  __device__ __forceinline__ void write_rows(const u8* rows) const {
    constexpr int PIECES = OUTPUTS / 8, EIGHTS = (Of::EIGHTS + RANKS - 1) / RANKS;
#pragma unroll
    for (int piece = threadIdx.x; piece < EIGHTS * 8 * PIECES; piece += Of::CONSUMERS) {
      int at = piece / PIECES, row = (at / 8 * RANKS + own.rank) * 8 + at % 8;
      int output = own.tile * OUTPUTS + piece % PIECES * 8;
      if (row < given.rows && output < given.outputs)
        *reinterpret_cast<uint4*>(given.out + (long long)row * given.outputs + output) =
            *reinterpret_cast<const uint4*>(rows + row * Of::ROW_BYTES + piece % PIECES * 16);
    }
  }

  // Sums over turns and cluster, and stores. The cluster barriers do not make writes visible, which would wait for all of
  // memory (0.3 us for both): the first only says that rings are free, and the receiver's barrier counts what is sent.
  template <int RANKS>
  __device__ __forceinline__ void store(const float (&total)[ROWS / 2]) const {
    static_assert(sizeof(shared.weight) + sizeof(shared.x) >= sizeof(Sums<RANKS>), "they fit in the ring");
    Sums<RANKS>& sums = reinterpret_cast<Sums<RANKS>&>(shared);
    // Wait until all warpgroups have read the last unit.
    meet();
    cluster_arrive_relaxed();
    send_sums<RANKS>(total, sums);
    wait(&shared.summed, 0);
    cluster_arrive_relaxed();
    add_up<RANKS>(sums);
    meet();
    write_rows<RANKS>(sums.rows);
    // A CTA must not exit while its partial sums are still on their way to another CTA.
    cluster_wait();
  }

  // Partial sums of a CTA without a cluster.
  struct TurnSums {
    // The first turn's are not used.
    float4 turns[Of::TURNS][Of::EIGHTS][Of::TURN];
    u8 rows[ROWS * Of::ROW_BYTES];
  };

  // Sums over turns, and stores.
  __device__ __forceinline__ void store_alone(const float (&total)[ROWS / 2]) const {
    static_assert(sizeof(shared.weight) + sizeof(shared.x) >= sizeof(TurnSums), "they fit in the ring");
    TurnSums& sums = reinterpret_cast<TurnSums&>(shared);
    meet();
    if (Of::TURNS > 1) {
      if (own.turn() > 0) {
#pragma unroll
        for (int j = 0; j < Of::EIGHTS; j++) sums.turns[own.turn()][j][threadIdx.x % Of::TURN] = part(total, j);
      }
      meet();
    }
    if (own.turn() == 0) {
#pragma unroll
      for (int j = 0; j < Of::EIGHTS; j++) {
        float4 sum = part(total, j);
#pragma unroll
        for (int other = 1; other < Of::TURNS; other++) add(sum, sums.turns[other][j][threadIdx.x % Of::TURN]);
        stage_rows(sums.rows, j, sum);
      }
    }
    meet();
    write_rows<1>(sums.rows);
  }

  // A CTA without a cluster cannot send to itself, and tilings without turns have none.
  __device__ __forceinline__ void add_and_store(const float (&total)[ROWS / 2]) const {
    if constexpr (Of::TURNS == 1) store_alone(total);
    else if (own.ranks == 1) store_alone(total);
    else if (own.ranks == 4) store<4>(total);
    else if (own.ranks == 3) store<3>(total);
    else store<2>(total);
  }
};
