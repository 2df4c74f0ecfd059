// Products of the experts' INT4 weights with FP8 rows, for Hopper (sm_90a). Up to 64 rows an expert the floor is the time to
// read the weights, outputs * inputs * (1/2 + 2/group) bytes an expert; from 128 rows on it is the tensor cores' for
// 2 * rows * outputs * inputs operations.
//
// Work. A tile is 256 outputs of one expert for up to 128 of its rows, or 128 outputs for few rows of few experts, where two
// warpgroups take every other group of inputs. Operands are swapped: the tensor cores' 64 rows hold
// outputs and N holds rows. The weights are the operand that comes from registers. They lie in shared memory in the order in
// which threads want them (operands.py), 16 bytes a thread, and three instructions turn eight of them into e4m3 numbers. The
// tensor cores sum the products over a group of 128 inputs, or over each quarter of it if these have scales of their own; the
// sums are scaled by each output's scale and added in float32. A row's own scale is applied when the tile is stored.
//
// A CTA fills a multiprocessor and draws one tile after another: tiles take unlike times, by their rows and by the bandwidth
// that a multiprocessor gets. Four warps copy weights and rows into a ring of stages of 128 inputs each, and run ahead into the
// next tile while sums are stored. One warp took as long to issue a stage's copies as memory took to deliver them (16 rows of
// 7168 to 4096: 134 us instead of 120; 64 rows: 187 instead of 151). Clusters of two CTAs that share rows by multicast made
// every shape slower, by up to 20%: the cache's bandwidth is no limit. Nothing is gained either by warpgroups that wait for
// each other so that one at a time uses the tensor cores.
//
// Experts that many tokens choose have more rows than a tile, most others fewer. So a tile multiplies only as many eights of rows as
// it has (from 64 on as many times 32): products of padding take power, which is what limits a step. Rows are copied in whole
// boxes, of up to 64.
//
// Two products in one kernel: the first one's outputs are gated, rounded to e4m3 by a static scale, and are the rows of the last
// one. Tiles of the last product follow those of the first without a pause; only copies of rows wait for what other CTAs store
// (progress.cuh), and weights are copied meanwhile. A single product counts as the last one, after a first one without tiles.
//
// With 128 rows the tensor cores are busy 73% of the time, at the 1.55 GHz that 700 W leave of 1.98.

#pragma once

#include "draws.cuh"
#include "outputs.cuh"
#include "products.cuh"
#include "progress.cuh"
#include "scaled_sums.cuh"
#include "shape.cuh"
#include "tiles.cuh"

template <int ROWS, int WARPGROUPS, int PARTS, int TURNS, int SCALES, bool MINIMUM>
struct Product {
  using Of = Shape<ROWS, WARPGROUPS, PARTS, TURNS, SCALES>;
  Shared<ROWS, WARPGROUPS, PARTS, TURNS, SCALES>& shared;
  const Arguments& given;
  // The warpgroup's place in its turn, and the turn: the same for a whole warp, as the compiler knows. So descriptors stay in
  // uniform registers.
  int warpgroup, turn;

  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      prefetch_map(given.first.x);
      prefetch_map(given.last.x);
      for (int stage = 0; stage < Of::STAGES; stage++) {
        init_barrier(&shared.full[stage], PRODUCERS);
        init_barrier(&shared.empty[stage], Of::TURN * WARPGROUP / 32);
      }
      fence_async_proxy();
    }
    wait_for_earlier();
    if (threadIdx.x < 32) {
      if (given.contiguous) count_used_tiles<ROWS>(given.layout, given.capacity / ROWS, shared.ends);
      else count_tiles<ROWS>(given.layout, given.experts, shared.ends);
    }
    __syncthreads();
  }

  // Tell consumers of a tile, and of its rows' scales; these include the weights' factor of 2^9.
  __device__ __forceinline__ void describe(int slot, const Tile& tile, const float* x_scales) const {
    int lane = threadIdx.x % 32;
    for (int row = lane; row < tile.rows; row += 32)
      shared.scales[slot][row] = x_scales[given.static_scales ? tile.expert : tile.first_row + row] * 512.0f;
    if (lane == 0) shared.tiles[slot] = tile;
    __syncwarp();
  }

  // Copies a warp's share of a stage: every fourth tile of weights; the last warp copies the boxes of rows too. stride:
  // bytes from a tile of outputs to the next.
  __device__ __forceinline__ void copy_group(const TensorMap& x, int first_row, int warp, int boxes, int tiles,
                                             const u8* weight, long long stride, int group, int stage) const {
    u64* full = &shared.full[stage];
    arrive_and_expect(full, tiles * Of::TILE_BYTES + boxes * Of::BOX_BYTES);
#pragma unroll
    for (int i = 0; i < ROWS / Of::BOX_ROWS; i++)
      if (i < boxes)
        copy_box(shared.x[stage] + i * Of::BOX_BYTES, x, group * GROUP_INPUTS, first_row + i * Of::BOX_ROWS, full);
#pragma unroll
    for (int i = 0; i < (Of::OUTPUT_TILES + PRODUCERS - 1) / PRODUCERS; i++)
      if (i < tiles) copy_run(shared.weight[stage][warp + i * PRODUCERS], weight + i * PRODUCERS * stride, Of::TILE_BYTES, full);
  }

  // The counter for which this thread waits, or null. Only the warp that copies rows waits: weights are on their way meanwhile.
  __device__ __forceinline__ int* waited_for(const Tile& tile, int warp) const {
    bool waits = !tile.gated && given.first.output_tiles && warp == PRODUCERS - 1 && threadIdx.x % 32 == 0;
    return waits ? &given.progress[tile.row_tile] : nullptr;
  }

  // Each of the producers' warps runs this.
  __device__ __forceinline__ void produce() const {
    Walk<ROWS, Of::OUTPUT_TILES> walk(given, shared.ends);
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % PRODUCERS, 0);
    int stores = walk.wide_tiles(given.first) * (Of::TURN * WARPGROUP / 32), reads = walk.wide_tiles(given.last);
    int stage = 0, phase = 1, slot = 0, number = blockIdx.x;
    Draws<WARPGROUP> draws(given.drawn, shared.numbers, warp == 0 && threadIdx.x % 32 == 0);
    while (true) {
      Tile tile = walk.at(number);
      const Operands& operands = tile.gated ? given.first : given.last;
      wait(&shared.empty[stage], phase);
      if (warp == 0) describe(slot, tile, operands.x_scales);
      if (!tile.rows) break;
      slot = slot == Of::STAGES ? 0 : slot + 1;
      int groups = operands.groups, tiles = min(Of::OUTPUT_TILES, operands.output_tiles - tile.first_output_tile);
      int own = (tiles - warp + PRODUCERS - 1) / PRODUCERS;
      int boxes = warp == PRODUCERS - 1 ? (tile.rows + Of::BOX_ROWS - 1) / Of::BOX_ROWS : 0;
      long long stride = groups * (long long)Of::TILE_BYTES;
      const u8* weight = operands.weight + (tile.expert * operands.output_tiles + tile.first_output_tile + warp) * stride;
      int* counter = waited_for(tile, warp);
      if (counter) wait_for_stores(counter, stores);
      __syncwarp();
#pragma unroll 1
      for (int group = 0; group < groups; group++, weight += Of::TILE_BYTES) {
        wait(&shared.empty[stage], phase);
        if (group == max(groups - DRAWN_AHEAD, 0)) draws.draw();
        if (threadIdx.x % 32 == 0) copy_group(operands.x, tile.first_row, warp, boxes, own, weight, stride, group, stage);
        if (++stage == Of::STAGES) stage = 0, phase ^= 1;
      }
      if (counter) tell_seen(counter, stores, reads);
      number = draws.number(walk.tiles);
    }
    // Each turn learns at its own stage that no tile is left.
    for (int i = 0; i < TURNS; i++) {
      wait(&shared.empty[stage], phase);
      if (threadIdx.x % 32 == 0) arrive(&shared.full[stage]);
      if (++stage == Of::STAGES) stage = 0, phase ^= 1;
    }
  }

  __device__ __forceinline__ Words<SCALES> load_words(int stage, int part) const {
    int thread = threadIdx.x % WARPGROUP;
    const u8* tile = shared.weight[stage][warpgroup * PARTS + part];
    Words<SCALES> words;
    words.half[0] = load_shared(tile + thread * 16);
    words.half[1] = load_shared(tile + WEIGHT_BYTES / 2 + thread * 16);
    words.load_scales(tile + WEIGHT_BYTES + thread / 4 * (SCALES * 4));
    return words;
  }

  __device__ __forceinline__ u64 rows_of(int stage) const {
    return descriptor<1>(shared_address(shared.x)) + stage * (Of::X_BYTES / 16);
  }

  // Start a group's products. Four warpgroups decode all operands first, while the tensor cores work for the others (64 rows:
  // 142 us instead of 154). Two decode an operand while the product before is made (128 rows: 226 us instead of 234).
  template <int HALF>
  __device__ __forceinline__ void multiply_group(int stage, const Words<SCALES>& words, float (&products)[HALF]) const {
    constexpr bool AT_ONCE = WARPGROUPS > 2;
    u64 x = rows_of(stage);
    u32 a[4][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      words.template decoded<MINIMUM>(a[step], step);
      if (AT_ONCE) pin(a[step]);
    }
    if (AT_ONCE) wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      if (!AT_ONCE) wgmma_fence();
      multiply(products, a[step], x + step * 2, step > 0);
    }
    wgmma_commit();
  }

  // The warp's place among the outputs: its tile of them, or the one after the last if this tile has fewer.
  __device__ __forceinline__ int output_tile(const Tile& tile, int part) const {
    return tile.first_output_tile + warpgroup * PARTS + part;
  }

  // What this thread multiplies its gated output by; loaded long before it is used.
  __device__ __forceinline__ float gated_factor(const Tile& tile, int part) const {
    int at = output_tile(tile, part), tiles = given.first.output_tiles;
    if (!tile.gated || at >= tiles) return 0.0f;
    return given.factors[(tile.expert * tiles + at) * (TILE_OUTPUTS / 2) + threadIdx.x % WARPGROUP / 4];
  }

  template <int HALF>
  __device__ __forceinline__ void store(int slot, const Tile& tile, int part, const float (&total)[HALF], float factor) const {
    constexpr int MADE = HALF * 2, STORED = MADE > 64 ? HALF : MADE;
    const Operands& operands = tile.gated ? given.first : given.last;
    int warp = threadIdx.x % WARPGROUP / 32, at = output_tile(tile, part);
    int rows = at < operands.output_tiles ? tile.rows : 0;
    int columns = tile.gated ? TILE_OUTPUTS / 2 : TILE_OUTPUTS;
    long long width = operands.output_tiles * (long long)columns;
    long long place = tile.first_row * width + at * columns + warp * (columns / 4);
#pragma unroll
    for (int first = 0; first < MADE; first += STORED, place += STORED * width) {
      Outputs<STORED> outputs(shared.rows[threadIdx.x / 32],
                              reinterpret_cast<const float2*>(&shared.scales[slot][first]) + threadIdx.x % 4);
      if (tile.gated) outputs.store_gated(total + first / 2, factor, given.inner + place, width, rows - first);
      else outputs.store(total + first / 2, given.out + place, width, rows - first);
    }
  }

  // Adds up the turns' sums of a tile. There is room for the sums of two tiles: before a warp writes those of a third, it has met
  // the first turn at the second tile's barrier, and by then the first turn has read those of the first tile.
  template <int HALF>
  __device__ __forceinline__ void add_turns(int tile, float (&total)[HALF]) const {
    if constexpr (TURNS > 1) {
      int thread = threadIdx.x % (Of::TURN * WARPGROUP);
      auto& sums = shared.sums[tile % 2];
#pragma unroll
      for (int j = 0; j < Of::QUADS; j++)
        if (turn) sums[turn - 1][j][thread] = make_float4(total[j * 4], total[j * 4 + 1], total[j * 4 + 2], total[j * 4 + 3]);
      // Producers meet at another barrier (draws.cuh).
      asm volatile("bar.sync 2, %0;" ::"n"(Of::CONSUMERS) : "memory");
      if (turn) return;
#pragma unroll
      for (int other = 0; other < TURNS - 1; other++)
#pragma unroll
        for (int j = 0; j < Of::QUADS; j++) {
          float4 sum = sums[other][j][thread];
          total[j * 4] += sum.x;
          total[j * 4 + 1] += sum.y;
          total[j * 4 + 2] += sum.z;
          total[j * 4 + 3] += sum.w;
        }
    }
  }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.empty[stage]);
  }

  // Computes and stores tile number `count` of this CTA, of up to MADE rows. The first stage of its turn has arrived.
  template <int MADE>
  __device__ __forceinline__ void make(int slot, const Tile& tile, int count, int& stage, int& phase) const {
    int groups = __shfl_sync(~0u, tile.gated ? given.first.groups : given.last.groups, 0);
    float total[PARTS][MADE / 2] = {}, factors[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) factors[part] = gated_factor(tile, part);
    Words<SCALES> words = load_words(stage, 0);
#pragma unroll 1
    for (int group = turn; group < groups; group += TURNS) {
      int next = stage + TURNS >= Of::STAGES ? stage + TURNS - Of::STAGES : stage + TURNS;
      phase ^= next < TURNS;
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        auto load_next = [&] {
          if (part < PARTS - 1) {
            words = load_words(stage, part + 1);
          } else if (group + TURNS < groups) {
            wait(&shared.full[next], phase);
            words = load_words(next, 0);
          }
        };
        if constexpr (SCALES == 1) {
          float products[MADE / 2];
          multiply_group(stage, words, products);
          u32 scales = words.scales[0];
          load_next();
          wgmma_wait<0>();
          pin(products);
          if (part == PARTS - 1) release(stage);
          add_scaled(products, scales, total[part]);
        } else {
          add_quarters<MINIMUM>(rows_of(stage), words, total[part], load_next);
          if (part == PARTS - 1) release(stage);
        }
      }
      stage = next;
    }
    Tile stored = shared.tiles[slot];
    add_turns(count, total[0]);
    if (turn) return;
#pragma unroll
    for (int part = 0; part < PARTS; part++) store(slot, stored, part, total[part], factors[part]);
    if (stored.gated) tell_stored(&given.progress[stored.row_tile]);
  }

  // Makes a tile of the smallest size that holds its rows.
  template <int MADE>
  __device__ __forceinline__ void make_fitting(int slot, const Tile& tile, int rows, int count, int& stage,
                                               int& phase) const {
    if constexpr (MADE > Of::LEAST) {
      constexpr int FEWER = MADE - (MADE > 64 ? 32 : 8);
      if (rows <= FEWER) return make_fitting<FEWER>(slot, tile, rows, count, stage, phase);
    }
    make<MADE>(slot, tile, count, stage, phase);
  }

  __device__ __forceinline__ void consume() const {
    int stage = turn, phase = 0, slot = 0;
    for (int count = 0;; count++) {
      wait(&shared.full[stage], phase);
      Tile tile = shared.tiles[slot];
      int rows = __shfl_sync(~0u, tile.rows, 0);
      if (!rows) break;
      make_fitting<ROWS>(slot, tile, rows, count, stage, phase);
      slot = slot == Of::STAGES ? 0 : slot + 1;
    }
  }
};

template <int ROWS, int WARPGROUPS, int PARTS, int TURNS, int SCALES, bool MINIMUM>
__device__ __forceinline__ void run(const Arguments& given) {
  using Of = Shape<ROWS, WARPGROUPS, PARTS, TURNS, SCALES>;
  using Memory = Shared<ROWS, WARPGROUPS, PARTS, TURNS, SCALES>;
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Memory) <= SHARED_BYTES);
  start_next();
  int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0);
  int turn = TURNS > 1 ? warpgroup / Of::TURN : 0;
  Product<ROWS, WARPGROUPS, PARTS, TURNS, SCALES, MINIMUM> product{*reinterpret_cast<Memory*>(memory), given,
                                                            warpgroup - turn * Of::TURN, turn};
  product.prepare();
  if (threadIdx.x >= Of::CONSUMERS) {
    give_registers<Of::FEW_REGISTERS>();
    product.produce();
  } else {
    take_registers<Of::REGISTERS>();
    product.consume();
  }
}


#define W4A8(NAME, ROWS, WARPGROUPS, PARTS, TURNS, SCALES, MINIMUM)                                                  \
  extern "C" __device__ int w4a8_##NAME##_##ROWS##_##WARPGROUPS##_##PARTS##_##TURNS##_shared_bytes = SHARED_BYTES;   \
  extern "C" __global__ void __launch_bounds__(Shape<ROWS, WARPGROUPS, PARTS, TURNS, SCALES>::THREADS, 1)            \
      w4a8_##NAME##_##ROWS##_##WARPGROUPS##_##PARTS##_##TURNS(const __grid_constant__ Arguments given) {             \
    run<ROWS, WARPGROUPS, PARTS, TURNS, SCALES, MINIMUM>(given);                                                     \
  }
// With -8 among the weights, and without.
#define BOTH(ROWS, WARPGROUPS, PARTS, TURNS, SCALES)       \
  W4A8(full, ROWS, WARPGROUPS, PARTS, TURNS, SCALES, true) \
  W4A8(symmetric, ROWS, WARPGROUPS, PARTS, TURNS, SCALES, false)
// The tilings of tiling.py.
#define ALL_TILINGS(SCALES)  \
  BOTH(16, 4, 1, 2, SCALES)  \
  BOTH(16, 4, 1, 1, SCALES)  \
  BOTH(24, 4, 1, 1, SCALES)  \
  BOTH(32, 4, 1, 1, SCALES)  \
  BOTH(128, 2, 2, 1, SCALES)
