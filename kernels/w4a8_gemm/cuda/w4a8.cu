// Products of the experts' INT4 weights with FP8 rows, for Hopper (sm_90a). Up to 64 rows an expert the floor is the time to
// read the weights, outputs * inputs * (1/2 + 1/64) bytes an expert; from 128 rows on it is the tensor cores' for
// 2 * rows * outputs * inputs operations.
//
// Work. A tile is 256 outputs of one expert for up to 128 of its rows. Operands are swapped: the tensor cores' 64 rows hold
// outputs and N holds rows. The weights are the operand that comes from registers. They lie in shared memory in the order in
// which threads want them (weight.py), 16 bytes a thread, and three instructions turn eight of them into e4m3 numbers. The
// tensor cores sum the products over a group of 128 inputs; these sums are scaled by the group's scale of each output and
// added in float32. A row's own scale is applied when the tile is stored.
//
// A CTA fills a multiprocessor and goes from tile to tile. Four warps copy weights and rows into a ring of stages of 128
// inputs each, and run ahead into the next tile while sums are stored. One warp took as long to issue a stage's copies as
// memory took to deliver them (16 rows of 7168 to 4096: 134 us instead of 120; 64 rows: 187 instead of 151). Clusters of two
// CTAs that share rows by multicast made every shape slower, by up to 20%: the cache's bandwidth is no limit. Nor do
// warpgroups that take turns at the tensor cores gain anything.
//
// With 128 rows the tensor cores are busy 73% of the time, at the 1.55 GHz that 700 W leave of 1.98.

#include "../../cuda/copies.cuh"
#include "../../cuda/registers.cuh"
#include "products.cuh"
#include "tiles.cuh"

constexpr int WARPGROUP = 128, PRODUCERS = WARPGROUP / 32, SHARED_BYTES = 230000;

// A tile of ROWS rows: each of WARPGROUPS warpgroups multiplies PARTS times 64 outputs.
template <int ROWS, int WARPGROUPS, int PARTS>
struct Shape {
  static constexpr int OUTPUT_TILES = WARPGROUPS * PARTS, CONSUMERS = WARPGROUPS * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
  static constexpr int X_BYTES = ROWS * GROUP_INPUTS;
  // Rows that a warp stores together.
  static constexpr int STORED = ROWS > 64 ? ROWS / 2 : ROWS;
  static constexpr int REST_BYTES = 1024 + CONSUMERS / 32 * STORED * 32 + MOST_EXPERTS * 4 + ROWS * 4;
  static constexpr int FIT = (SHARED_BYTES - REST_BYTES) / (X_BYTES + OUTPUT_TILES * TILE_BYTES + ROWS * 4 + 32);
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  static constexpr int FEW_REGISTERS = WARPGROUPS == 2 ? 40 : 32, REGISTERS = WARPGROUPS == 2 ? 232 : 112;
};

template <int ROWS, int WARPGROUPS, int PARTS>
struct Shared {
  using Of = Shape<ROWS, WARPGROUPS, PARTS>;
  u8 x[Of::STAGES][Of::X_BYTES];
  u8 weight[Of::STAGES][Of::OUTPUT_TILES][TILE_BYTES];
  // 16 outputs a row for each warp.
  uint4 rows[Of::CONSUMERS / 32][Of::STORED * 2];
  u64 full[Of::STAGES], empty[Of::STAGES];
  // The first producer writes a tile here before the tile's first stage. It is at most STAGES tiles ahead of a consumer that
  // still stores one.
  Tile tiles[Of::STAGES + 1];
  float scales[Of::STAGES + 1][ROWS];
  int ends[MOST_EXPERTS];
};

// A thread's share of a tile of weights of one group, and of its scales.
struct Words {
  uint4 half[2];
  u32 scales;
};

__device__ __forceinline__ uint4 load_shared(const void* from) {
  uint4 found;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(shared_address(from)));
  return found;
}

__device__ __forceinline__ void store_global(void* to, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(first), "r"(second), "r"(third), "r"(fourth) : "memory");
}

template <int ROWS, int WARPGROUPS, int PARTS, bool MINIMUM>
struct Product {
  using Of = Shape<ROWS, WARPGROUPS, PARTS>;
  Shared<ROWS, WARPGROUPS, PARTS>& shared;
  const Arguments& given;
  // The same for a whole warp, as the compiler knows: so descriptors stay in uniform registers.
  int warpgroup;

  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      prefetch_map(given.x);
      for (int stage = 0; stage < Of::STAGES; stage++) {
        init_barrier(&shared.full[stage], PRODUCERS);
        init_barrier(&shared.empty[stage], Of::CONSUMERS / 32);
      }
      fence_async_proxy();
    }
    wait_for_earlier();
    if (threadIdx.x < 32 && !given.contiguous) count_tiles<ROWS>(given.layout, given.experts, shared.ends);
    __syncthreads();
  }

  // Tell consumers of a tile, and of its rows' scales; these include the weights' factor of 2^9.
  __device__ __forceinline__ void describe(int slot, const Tile& tile) const {
    int lane = threadIdx.x % 32;
    for (int row = lane; row < tile.rows; row += 32)
      shared.scales[slot][row] = given.x_scales[given.static_scales ? tile.expert : tile.first_row + row] * 512.0f;
    if (lane == 0) shared.tiles[slot] = tile;
    __syncwarp();
  }

  // A warp's share of a stage: every fourth tile of weights; the last warp copies the rows too.
  __device__ __forceinline__ void copy_group(const Tile& tile, int warp, int tiles, const u8* weight, int group, int stage) const {
    u64* full = &shared.full[stage];
    bool rows = warp == PRODUCERS - 1;
    arrive_and_expect(full, tiles * TILE_BYTES + rows * Of::X_BYTES);
    if (rows) copy_box(shared.x[stage], given.x, group * GROUP_INPUTS, tile.first_row, full);
#pragma unroll
    for (int i = 0; i < (Of::OUTPUT_TILES + PRODUCERS - 1) / PRODUCERS; i++)
      if (i < tiles) copy_run(shared.weight[stage][warp + i * PRODUCERS], weight + i * PRODUCERS * given.groups * TILE_BYTES, TILE_BYTES, full);
  }

  // Each of the producers' warps runs this.
  __device__ __forceinline__ void produce() const {
    Walk<ROWS, Of::OUTPUT_TILES> walk(given, shared.ends);
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % PRODUCERS, 0);
    int stage = 0, phase = 1, slot = 0;
    while (true) {
      Tile tile = walk.next();
      wait(&shared.empty[stage], phase);
      if (warp == 0) describe(slot, tile);
      if (!tile.rows) break;
      slot = slot == Of::STAGES ? 0 : slot + 1;
      int tiles = min(Of::OUTPUT_TILES, given.output_tiles - tile.first_output_tile);
      int own = (tiles - warp + PRODUCERS - 1) / PRODUCERS;
      const u8* weight = given.weight + (tile.expert * given.output_tiles + tile.first_output_tile + warp) * given.groups * (long long)TILE_BYTES;
#pragma unroll 1
      for (int group = 0; group < given.groups; group++, weight += TILE_BYTES) {
        wait(&shared.empty[stage], phase);
        if (threadIdx.x % 32 == 0) copy_group(tile, warp, own, weight, group, stage);
        if (++stage == Of::STAGES) stage = 0, phase ^= 1;
      }
    }
    if (threadIdx.x % 32 == 0) arrive(&shared.full[stage]);
  }

  __device__ __forceinline__ Words load_words(int stage, int part) const {
    int thread = threadIdx.x % WARPGROUP;
    const u8* tile = shared.weight[stage][warpgroup * PARTS + part];
    Words words;
    words.half[0] = load_shared(tile + thread * 16);
    words.half[1] = load_shared(tile + WEIGHT_BYTES / 2 + thread * 16);
    words.scales = *reinterpret_cast<const u32*>(tile + WEIGHT_BYTES + thread / 4 * 4);
    return words;
  }

  // Start a group's products. Four warpgroups decode all operands first, while the tensor cores work for the others (64 rows:
  // 142 us instead of 154). Two decode an operand while the product before is made (128 rows: 226 us instead of 234).
  __device__ __forceinline__ void multiply_group(int stage, const Words& words, float (&products)[ROWS / 2]) const {
    constexpr bool AT_ONCE = WARPGROUPS > 2;
    u64 x = descriptor<1>(shared_address(shared.x)) + stage * (Of::X_BYTES / 16);
    u32 a[4][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const uint4& half = words.half[step / 2];
      decode<MINIMUM>(a[step], step % 2 ? half.z : half.x, step % 2 ? half.w : half.y);
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

  __device__ __forceinline__ static void add(const float (&products)[ROWS / 2], u32 scales, float (&total)[ROWS / 2]) {
    float first = __uint_as_float(scales << 16), second = __uint_as_float(scales & 0xFFFF0000u);
#pragma unroll
    for (int j = 0; j < ROWS / 2; j += 4) {
      total[j] = fmaf(products[j], first, total[j]);
      total[j + 1] = fmaf(products[j + 1], first, total[j + 1]);
      total[j + 2] = fmaf(products[j + 2], second, total[j + 2]);
      total[j + 3] = fmaf(products[j + 3], second, total[j + 3]);
    }
  }

  // Sums of 16 rows, scaled, to bf16 and transposed: a row's 16 outputs next to each other.
  __device__ __forceinline__ static void stage_rows(uint4* staged, const float* total, const float2* scales) {
    int lane = threadIdx.x % 32;
    u32 packed[4];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      packed[k * 2] = pack_bf16(total[k * 4] * scales[k].x, total[k * 4 + 1] * scales[k].y);
      packed[k * 2 + 1] = pack_bf16(total[k * 4 + 2] * scales[k].x, total[k * 4 + 3] * scales[k].y);
    }
    // Lanes l / 8 point to the rows of matrices: rows 0 to 7 or 8 to 15, outputs 0 to 7 or 8 to 15.
    u32 address = shared_address(staged) + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
    store_transposed(address, packed[0], packed[1], packed[2], packed[3]);
  }

  // A warp's 16 outputs of STORED rows, 32 bytes each. Each step is made for all of them before the next: 16 rows after 16
  // rows would wait for shared memory and for registers each time.
  __device__ __forceinline__ void store_rows(const float* total, const float2* from, unsigned short* out, long long width,
                                             int rows) const {
    int lane = threadIdx.x % 32;
    uint4* staged = shared.rows[threadIdx.x / 32];
    float2 scales[Of::STORED / 8];
    uint4 found[Of::STORED / 16];
#pragma unroll
    for (int j = 0; j < Of::STORED / 8; j++) scales[j] = from[j * 4];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Of::STORED / 16; i++) stage_rows(staged + i * 32, total + i * 8, scales + i * 2);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Of::STORED / 16; i++) found[i] = staged[i * 32 + lane];
#pragma unroll
    for (int i = 0; i < Of::STORED / 16; i++, out += 16 * width)
      if (i * 16 + lane / 2 < rows) store_global(out, found[i]);
  }

  __device__ __forceinline__ void store(int slot, int part, const float (&total)[ROWS / 2]) const {
    Tile tile = shared.tiles[slot];
    const float2* scales = reinterpret_cast<const float2*>(shared.scales[slot]) + threadIdx.x % 4;
    int lane = threadIdx.x % 32, output_tile = tile.first_output_tile + warpgroup * PARTS + part;
    int rows = output_tile < given.output_tiles ? tile.rows : 0;
    long long width = (long long)given.output_tiles * TILE_OUTPUTS;
    unsigned short* out = given.out + (tile.first_row + lane / 2) * width + output_tile * TILE_OUTPUTS +
                          threadIdx.x % WARPGROUP / 32 * 16 + lane % 2 * 8;
#pragma unroll
    for (int first = 0; first < ROWS; first += Of::STORED)
      store_rows(total + first / 2, scales + first / 2, out + first * width, width, rows - first);
  }

  __device__ __forceinline__ void consume() const {
    int stage = 0, phase = 0, slot = 0;
    while (true) {
      wait(&shared.full[stage], phase);
      if (!shared.tiles[slot].rows) break;
      float total[PARTS][ROWS / 2] = {};
      Words words = load_words(stage, 0);
#pragma unroll 1
      for (int group = 0; group < given.groups; group++) {
        int next = stage + 1 == Of::STAGES ? 0 : stage + 1;
        phase ^= next == 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          float products[ROWS / 2];
          multiply_group(stage, words, products);
          u32 weight_scales = words.scales;
          if (part < PARTS - 1) {
            words = load_words(stage, part + 1);
          } else if (group + 1 < given.groups) {
            wait(&shared.full[next], phase);
            words = load_words(next, 0);
          }
          wgmma_wait<0>();
          pin(products);
          if (part == PARTS - 1) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(&shared.empty[stage]);
          }
          add(products, weight_scales, total[part]);
        }
        stage = next;
      }
      store(slot, 0, total[0]);
      if constexpr (PARTS > 1) store(slot, 1, total[1]);
      slot = slot == Of::STAGES ? 0 : slot + 1;
    }
  }
};

template <int ROWS, int WARPGROUPS, int PARTS, bool MINIMUM>
__device__ __forceinline__ void run(const Arguments& given) {
  using Of = Shape<ROWS, WARPGROUPS, PARTS>;
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Shared<ROWS, WARPGROUPS, PARTS>) <= SHARED_BYTES);
  start_next();
  Product<ROWS, WARPGROUPS, PARTS, MINIMUM> product{*reinterpret_cast<Shared<ROWS, WARPGROUPS, PARTS>*>(memory), given,
                                                     __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0)};
  product.prepare();
  if (threadIdx.x >= Of::CONSUMERS) {
    give_registers<Of::FEW_REGISTERS>();
    product.produce();
  } else {
    take_registers<Of::REGISTERS>();
    product.consume();
  }
}

#define W4A8(NAME, ROWS, WARPGROUPS, PARTS, MINIMUM)                                                        \
  extern "C" __device__ int w4a8_##NAME##_##ROWS##_##WARPGROUPS##_##PARTS##_shared_bytes = SHARED_BYTES;    \
  extern "C" __global__ void __launch_bounds__(Shape<ROWS, WARPGROUPS, PARTS>::THREADS, 1)                  \
      w4a8_##NAME##_##ROWS##_##WARPGROUPS##_##PARTS(const __grid_constant__ Arguments given) {              \
    run<ROWS, WARPGROUPS, PARTS, MINIMUM>(given);                                                           \
  }
// With -8 among the weights, and without.
#define BOTH(ROWS, WARPGROUPS, PARTS)         \
  W4A8(full, ROWS, WARPGROUPS, PARTS, true)   \
  W4A8(symmetric, ROWS, WARPGROUPS, PARTS, false)
BOTH(16, 4, 1)
BOTH(32, 4, 1)
BOTH(48, 4, 1)
BOTH(64, 4, 1)
BOTH(96, 2, 2)
BOTH(128, 2, 2)
