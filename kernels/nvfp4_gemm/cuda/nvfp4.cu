// Products of NVFP4 weights with bf16 rows, for Hopper (sm_90a), exact in the weights' values. With few rows the floor is the
// time to read the weights, outputs * inputs * (1/2 + 1/16) bytes an expert; with many it is the tensor cores' for
// 2 * rows * outputs * inputs operations.
//
// Work. A tile is 256 or 512 outputs of one expert for up to 128 of its rows. Operands are swapped: the tensor cores' 64 rows
// hold outputs and N holds rows. The weights are the operand that comes from registers: they lie in shared memory in the order
// in which threads want them (packing.py), 16 bytes a thread, and become bf16 in registers, multiplied by their group's scale.
// So sums run over all inputs in the tensor cores. A matrix's own scale is applied when the tile is stored.
//
// A CTA fills a multiprocessor and goes from tile to tile. Four warps copy codes, scales and rows into a ring of stages, and
// run ahead into the next tile while sums are stored. A warpgroup decodes the weights of 64 inputs while the tensor cores
// multiply those before, or, with 512 outputs, those of other warpgroups. If there are too few tiles for all multiprocessors,
// a tile has fewer outputs, and the warpgroups share its inputs (SPLIT) and add up their sums.

#include "products.cuh"
#include "tiles.cuh"

constexpr int WARPGROUP = 128, PRODUCERS = WARPGROUP / 32, SHARED_BYTES = 230000;
// Inputs whose weights a warpgroup decodes at once, and whose rows a box holds.
constexpr int HALF_INPUTS = TILE_INPUTS / 2;

// A tile of ROWS rows: of WARPGROUPS warpgroups each multiplies PARTS times 64 outputs; SPLIT of them have the same outputs.
template <int ROWS_, int WARPGROUPS, int PARTS_, int SPLIT_>
struct Shape {
  static constexpr int ROWS = ROWS_, PARTS = PARTS_, SPLIT = SPLIT_;
  static constexpr int OUTPUT_TILES = WARPGROUPS / SPLIT * PARTS, CONSUMERS = WARPGROUPS * WARPGROUP;
  static constexpr int THREADS = CONSUMERS + WARPGROUP;
  static constexpr int BOX_BYTES = ROWS * HALF_INPUTS * 2;
  static constexpr int STAGE_BYTES = SPLIT * (2 * BOX_BYTES + OUTPUT_TILES * (CODE_BYTES + SCALE_BYTES));
  // Rows that a warp stores together.
  static constexpr int STORED = ROWS > 64 ? ROWS / 2 : ROWS;
  static constexpr int SUM_BYTES = (SPLIT - 1) * OUTPUT_TILES * TILE_OUTPUTS * ROWS * 4;
  static constexpr int REST_BYTES = 1024 + CONSUMERS / SPLIT / 32 * STORED * 32 + SUM_BYTES + MOST_EXPERTS * 4;
  static constexpr int FIT = (SHARED_BYTES - REST_BYTES) / (STAGE_BYTES + 64);
  static constexpr int STAGES = FIT < 12 ? FIT : 12;
  // Sets of operands: the next is decoded while the tensor cores use one, if there are registers for two.
  static constexpr int SETS = WARPGROUPS > 2 && PARTS > 1 ? 1 : 2;
  static constexpr int FEW_REGISTERS = WARPGROUPS == 2 ? 40 : 32, REGISTERS = WARPGROUPS == 2 ? 232 : 112;
};

template <class Of>
struct Shared {
  u8 x[Of::STAGES][Of::SPLIT][2][Of::BOX_BYTES];
  u8 codes[Of::STAGES][Of::SPLIT][Of::OUTPUT_TILES][CODE_BYTES];
  u8 scales[Of::STAGES][Of::SPLIT][Of::OUTPUT_TILES][SCALE_BYTES];
  // 16 outputs a row for each warp that stores.
  uint4 rows[Of::CONSUMERS / Of::SPLIT / 32][Of::STORED * 2];
  // Sums of the warpgroups that do not store.
  float4 sums[Of::SUM_BYTES / WARPGROUP / 16 + 1][WARPGROUP];
  u64 full[Of::STAGES], empty[Of::STAGES];
  // The first producer writes a tile here before the tile's first stage. It is at most STAGES tiles ahead of a consumer that
  // still stores one.
  Tile tiles[Of::STAGES + 1];
  int tile_ends[MOST_EXPERTS];
};

// A thread's share of a tile's codes and scales of 64 inputs.
struct Words {
  uint4 codes;
  uint2 scales;
};

template <class Of>
struct Product {
  static constexpr int PARTS = Of::PARTS, SUMS = Of::ROWS / 2;
  Shared<Of>& shared;
  const Arguments& given;
  // The same for a whole warp, as the compiler knows: so descriptors stay in uniform registers. `split` is the share of the
  // inputs, `first_part` the first of the own tiles of outputs.
  int split, first_part;
  // This thread's places in the first stage, and the low half of the descriptor of its rows.
  u32 codes_at, scales_at, x_at;
  // EXPONENT in a register, which the compiler does not know: an instruction with two masks has room for one constant.
  u32 exponent;

  __device__ __forceinline__ Product(Shared<Of>& shared, const Arguments& given, int warpgroup)
      : shared(shared), given(given), split(warpgroup % Of::SPLIT), first_part(warpgroup / Of::SPLIT * PARTS) {
    int thread = threadIdx.x % WARPGROUP;
    codes_at = shared_address(shared.codes[0][split][first_part]) + thread * 16;
    scales_at = shared_address(shared.scales[0][split][first_part]) + thread / 4 * 8;
    x_at = (u32)descriptor<1>(shared_address(shared.x[0][split]));
    exponent = EXPONENT | given.groups >> 31;
    // Without this they would be computed again for each stage.
    asm volatile("" : "+r"(codes_at), "+r"(scales_at));
  }

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
    if (threadIdx.x < 32) count_tiles<Of::ROWS>(given.ends, given.experts, shared.tile_ends);
    __syncthreads();
  }

  // Copies a warp's share of a stage: codes, scales, or half of the inputs of rows.
  __device__ __forceinline__ void copy_groups(const Tile& tile, int warp, int tiles, int group, int stage) const {
    u64* full = &shared.full[stage];
    int bytes = warp == 0 ? tiles * CODE_BYTES : warp == 1 ? tiles * SCALE_BYTES : Of::BOX_BYTES;
    arrive_and_expect(full, Of::SPLIT * bytes);
#pragma unroll
    for (int i = 0; i < Of::SPLIT; i++) {
      long long first = ((long long)tile.expert * given.groups + group + i) * given.output_tiles + tile.first_output_tile;
      if (warp == 0) copy_run(shared.codes[stage][i], given.codes + first * CODE_BYTES, bytes, full);
      else if (warp == 1) copy_run(shared.scales[stage][i], given.scales + first * SCALE_BYTES, bytes, full);
      else copy_box(shared.x[stage][i][warp - 2], given.x, (group + i) * TILE_INPUTS * 2 + (warp - 2) * HALF_INPUTS * 2, tile.first_row, full);
    }
  }

  // Each of the producers' warps runs this.
  __device__ __forceinline__ void produce() const {
    Walk<Of::ROWS, Of::OUTPUT_TILES> walk(given, shared.tile_ends);
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32 % PRODUCERS, 0), lane = threadIdx.x % 32;
    int stage = 0, phase = 1, slot = 0;
    while (true) {
      Tile tile = walk.next();
      wait(&shared.empty[stage], phase);
      if (warp == 0 && lane == 0) shared.tiles[slot] = tile;
      __syncwarp();
      if (!tile.rows) break;
      slot = slot == Of::STAGES ? 0 : slot + 1;
      int tiles = min(Of::OUTPUT_TILES, given.output_tiles - tile.first_output_tile);
#pragma unroll 1
      for (int group = 0; group < given.groups; group += Of::SPLIT) {
        wait(&shared.empty[stage], phase);
        if (lane == 0) copy_groups(tile, warp, tiles, group, stage);
        if (++stage == Of::STAGES) stage = 0, phase ^= 1;
      }
    }
    if (lane == 0) arrive(&shared.full[stage]);
  }

  __device__ __forceinline__ void load_words(int stage, int half, Words (&words)[PARTS]) const {
    u32 codes = codes_at + stage * (Of::SPLIT * Of::OUTPUT_TILES * CODE_BYTES);
    u32 scales = scales_at + stage * (Of::SPLIT * Of::OUTPUT_TILES * SCALE_BYTES);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      words[part].codes = load_shared(codes + part * CODE_BYTES + half * (CODE_BYTES / 2));
      words[part].scales = load_shared_pair(scales + part * SCALE_BYTES + half * (SCALE_BYTES / 2));
    }
  }

  __device__ __forceinline__ void decode_words(const Words& words, u32 (&a)[4][4]) const {
    u32 early[2], late[2];
    decode_scales(early, words.scales.x, exponent);
    decode_scales(late, words.scales.y, exponent);
    decode(a[0], words.codes.x, early[0]);
    decode(a[1], words.codes.y, early[1]);
    decode(a[2], words.codes.z, late[0]);
    decode(a[3], words.codes.w, late[1]);
#pragma unroll
    for (int step = 0; step < 4; step++) pin(a[step]);
  }

  // Start the products of half of a stage's inputs.
  __device__ __forceinline__ void multiply_half(int stage, int half, const u32 (&a)[PARTS][4][4], float (&total)[PARTS][SUMS]) const {
    // The addresses of all boxes fit the low half.
    u64 x = (descriptor<1>(0) & ~0xFFFFFFFFull) | (x_at + (stage * Of::SPLIT * 2 + half) * (Of::BOX_BYTES / 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int part = 0; part < PARTS; part++) multiply_bf16(total[part], a[part][step], x + step * 2);
    wgmma_commit();
  }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.empty[stage]);
  }

  // The sums of a tile over this warpgroup's share of the inputs. Operands of half a stage are decoded while those before are
  // multiplied.
  __device__ __forceinline__ void sum_tile(int& stage, int& phase, float (&total)[PARTS][SUMS]) const {
    u32 a[Of::SETS][PARTS][4][4];
    int before = stage;
    Words words[PARTS];
    load_words(stage, 0, words);
#pragma unroll 1
    for (int group = 0; group < given.groups; group += Of::SPLIT) {
      int next = stage + 1 == Of::STAGES ? 0 : stage + 1;
      phase ^= next == 0;
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) decode_words(words[part], a[half % Of::SETS][part]);
        multiply_half(stage, half, a[half % Of::SETS], total);
        if (half == 0) {
          load_words(stage, 1, words);
        } else if (group + Of::SPLIT < given.groups) {
          wait(&shared.full[next], phase);
          load_words(next, 0, words);
        }
        wgmma_wait<Of::SETS - 1>();
        if (half == 0 && group) release(before);
      }
      before = stage;
      stage = next;
    }
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int part = 0; part < PARTS; part++) pin(total[part]);
  }

  // Add the other warpgroups' sums to those of the first.
  __device__ __forceinline__ void add_splits(float (&total)[SUMS]) const {
    int thread = threadIdx.x % WARPGROUP;
    constexpr int QUARTERS = SUMS / 4, OWNERS = Of::CONSUMERS / WARPGROUP / Of::SPLIT;
    asm volatile("bar.sync 1, %0;" ::"n"(Of::CONSUMERS) : "memory");
    for (int turn = split; turn > 0; turn = 0)
#pragma unroll
      for (int i = 0; i < QUARTERS; i++)
        shared.sums[((split - 1) * OWNERS + first_part) * QUARTERS + i][thread] =
            make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
    asm volatile("bar.sync 1, %0;" ::"n"(Of::CONSUMERS) : "memory");
    for (int turn = split; turn == 0; turn = 1)
#pragma unroll
      for (int other = 0; other < Of::SPLIT - 1; other++)
#pragma unroll
        for (int i = 0; i < QUARTERS; i++) {
          float4 more = shared.sums[(other * OWNERS + first_part) * QUARTERS + i][thread];
          total[4 * i] += more.x, total[4 * i + 1] += more.y, total[4 * i + 2] += more.z, total[4 * i + 3] += more.w;
        }
  }

  // Sums of 16 rows, scaled, to bf16 and transposed: a row's 16 outputs next to each other.
  __device__ __forceinline__ static void stage_rows(uint4* staged, const float* total, float scale) {
    int lane = threadIdx.x % 32;
    u32 packed[4];
#pragma unroll
    for (int k = 0; k < 4; k++) packed[k] = pack_bf16(total[k * 2] * scale, total[k * 2 + 1] * scale);
    // Lanes l / 8 point to the rows of matrices: rows 0 to 7 or 8 to 15, outputs 0 to 7 or 8 to 15.
    u32 address = shared_address(staged) + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
    store_transposed(address, packed[0], packed[1], packed[2], packed[3]);
  }

  // Stores a warp's 16 outputs of STORED rows, 32 bytes each. Each step is made for all of them before the next.
  __device__ __forceinline__ void store_rows(const float* total, float scale, unsigned short* out, long long width, int rows) const {
    int lane = threadIdx.x % 32;
    uint4* staged = shared.rows[first_part / PARTS * 4 + threadIdx.x % WARPGROUP / 32];
    uint4 found[Of::STORED / 16];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Of::STORED / 16; i++) stage_rows(staged + i * 32, total + i * 8, scale);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Of::STORED / 16; i++) found[i] = staged[i * 32 + lane];
#pragma unroll
    for (int i = 0; i < Of::STORED / 16; i++, out += 16 * width)
      if (i * 16 + lane / 2 < rows) store_global(out, found[i]);
  }

  // The scales of the matrices of each part's outputs; weights are 2^-8 times their values.
  __device__ __forceinline__ void load_global_scales(const Tile& tile, float (&scales)[PARTS]) const {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      int output_tile = min(tile.first_output_tile + first_part + part, given.output_tiles - 1);
      scales[part] = given.global_scales[tile.expert * given.parts + output_tile * given.parts / given.output_tiles] * 256.0f;
    }
  }

  __device__ __forceinline__ void store(const Tile& tile, int part, float scale, const float (&total)[SUMS]) const {
    int lane = threadIdx.x % 32, output_tile = tile.first_output_tile + first_part + part;
    if (output_tile >= given.output_tiles) return;
    long long width = (long long)given.output_tiles * TILE_OUTPUTS;
    unsigned short* out = given.out + (tile.first_row + lane / 2) * width + output_tile * TILE_OUTPUTS +
                          threadIdx.x % WARPGROUP / 32 * 16 + lane % 2 * 8;
#pragma unroll
    for (int first = 0; first < Of::ROWS; first += Of::STORED)
      store_rows(total + first / 2, scale, out + first * width, width, tile.rows - first);
  }

  __device__ __forceinline__ void consume() const {
    int stage = 0, phase = 0, slot = 0;
    while (true) {
      wait(&shared.full[stage], phase);
      Tile tile = shared.tiles[slot];
      if (!tile.rows) break;
      float total[PARTS][SUMS] = {}, scales[PARTS];
      // Loaded before the sums, although they are needed after them: otherwise the tensor cores would wait for memory.
      load_global_scales(tile, scales);
      sum_tile(stage, phase, total);
      if constexpr (Of::SPLIT > 1) add_splits(total[0]);
      for (int turn = split; turn == 0; turn = 1)
#pragma unroll
        for (int part = 0; part < PARTS; part++) store(tile, part, scales[part], total[part]);
      slot = slot == Of::STAGES ? 0 : slot + 1;
    }
  }
};

template <class Of>
__device__ __forceinline__ void run(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Shared<Of>) <= SHARED_BYTES);
  start_next();
  Product<Of> product(*reinterpret_cast<Shared<Of>*>(memory), given, __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0));
  product.prepare();
  if (threadIdx.x >= Of::CONSUMERS) {
    give_registers<Of::FEW_REGISTERS>();
    product.produce();
  } else {
    take_registers<Of::REGISTERS>();
    product.consume();
  }
}

#define NVFP4(ROWS, WARPGROUPS, PARTS, SPLIT)                                                                     \
  extern "C" __device__ int nvfp4_##ROWS##_##WARPGROUPS##_##PARTS##_##SPLIT##_shared_bytes = SHARED_BYTES;        \
  extern "C" __global__ void __launch_bounds__(Shape<ROWS, WARPGROUPS, PARTS, SPLIT>::THREADS, 1)                 \
      nvfp4_##ROWS##_##WARPGROUPS##_##PARTS##_##SPLIT(const __grid_constant__ Arguments given) {                  \
    run<Shape<ROWS, WARPGROUPS, PARTS, SPLIT>>(given);                                                            \
  }
NVFP4(16, 4, 1, 1)
NVFP4(32, 4, 1, 1)
NVFP4(48, 4, 1, 1)
NVFP4(16, 4, 2, 1)
NVFP4(32, 4, 2, 1)
NVFP4(48, 4, 2, 1)
NVFP4(64, 4, 1, 1)
NVFP4(96, 2, 2, 1)
NVFP4(128, 2, 2, 1)
// For few tiles.
NVFP4(16, 4, 1, 4)
NVFP4(32, 4, 1, 4)
NVFP4(64, 4, 1, 2)
