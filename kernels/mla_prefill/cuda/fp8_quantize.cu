// Keys and values of prompts in e4m3, for Hopper's attention in FP8: joins each head's own part of a key with the part that all
// heads share, and transposes values.
//
// A CTA does the keys of a head's block, or its values: reads 2 * 128 bytes a key for either, and 2 * 64 that all heads read;
// writes 192 or 128. What it writes lies as products read it from shared memory, so that a plain copy brings it there: keys as
// rows of 128 and of 64 bytes, values as rows of 128 and of 32 keys, swizzled over their length. Rows after the prompt's last key
// are zeros. Twelve pieces of 16 bytes a thread, all loaded at once, and two CTAs keep the memory busy.
//
// Values' keys are permuted within each 16: keys 2q, 2q + 1, 2q + 8 and 2q + 9 lie together, since one thread has the weights of
// these.

#include "../../cuda/values.cuh"

constexpr int KEYS = 160;
constexpr int OWN = 128, ROPE = 64, WIDTH = OWN + ROPE, VALUE = 128;
constexpr int THREADS = KEYS * 2, WARPS = THREADS / 32;
// A thread's pieces of 8 channels.
constexpr int OWN_PIECES = KEYS * OWN / VALUES / THREADS, KEY_PIECES = KEYS * WIDTH / VALUES / THREADS;
constexpr int VALUE_PIECES = KEYS * VALUE / VALUES / THREADS;
// A row of transposed values in words of four keys, one more for fewer conflicts of banks.
constexpr int ROW_WORDS = KEYS / 4 + 1;
// The smallest magnitude that the scale of values stands for. Weights are multiplied by it, and must not vanish where values
// are zero.
constexpr float SMALLEST_VALUE = 1.0f / 32;

struct Block {
  // The first key among the keys of all prompts, and how many there are.
  int first_key, keys;
};

struct Scales {
  float key, value_log2, value_inverse, unused;
};

struct Arguments {
  const u8 *own, *shared, *value;
  const Block* blocks;
  u8 *keys, *values;
  Scales* scales;
  // Bytes from one key, and from one head, to the next.
  long long own_row, shared_row, value_row;
  int own_head, value_head, block_count;
};

struct Shared {
  float largest[WARPS];
  u32 values[VALUE][ROW_WORDS];
};

// The largest magnitude of all threads' pieces. These are unpacked here and once more later: kept unpacked, they would take twice
// the registers.
template <int PIECES>
__device__ __forceinline__ float largest_of(uint4 (&pieces)[PIECES], float (&of_warps)[WARPS]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    Values piece = Values::of(pieces[i]);
#pragma unroll
    for (int k = 0; k < VALUES; k++) largest = fmaxf(largest, fabsf(piece.value[k]));
  }
#pragma unroll
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; i++) largest = fmaxf(largest, of_warps[i]);
#pragma unroll
  for (uint4& piece : pieces) asm volatile("" : "+r"(piece.x), "+r"(piece.y), "+r"(piece.z), "+r"(piece.w));
  return largest;
}

__device__ __forceinline__ uint4 load_or_zero(const u8* from, bool known) {
  return known ? __ldcs(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}

// Neighbouring threads have neighbouring pieces of a key: first all keys' own parts, then the shared ones.
__device__ __forceinline__ void quantize_keys(const Arguments& given, Shared& memory, Block block, int head, long long at_block) {
  uint4 pieces[KEY_PIECES];
  int key = threadIdx.x / (OWN / VALUES), piece = threadIdx.x % (OWN / VALUES);
  int rope_key = threadIdx.x / (ROPE / VALUES), rope_piece = threadIdx.x % (ROPE / VALUES);
  const u8* own = given.own + (long long)head * given.own_head + (block.first_key + key) * given.own_row + piece * 16;
  const u8* shared = given.shared + (block.first_key + rope_key) * given.shared_row + rope_piece * 16;
#pragma unroll
  for (int i = 0; i < OWN_PIECES; i++) {
    int ahead = i * (THREADS / (OWN / VALUES));
    pieces[i] = load_or_zero(own + ahead * given.own_row, key + ahead < block.keys);
  }
#pragma unroll
  for (int i = OWN_PIECES; i < KEY_PIECES; i++) {
    int ahead = (i - OWN_PIECES) * (THREADS / (ROPE / VALUES));
    bool known = rope_key + ahead < block.keys;
    pieces[i] = known ? *reinterpret_cast<const uint4*>(shared + ahead * given.shared_row) : make_uint4(0, 0, 0, 0);
  }
  float scale = fmaxf(largest_of(pieces, memory.largest), SMALLEST_MAGNITUDE) / LARGEST_E4M3;
  if (threadIdx.x == 0) given.scales[at_block].key = scale;
  u8* image = given.keys + at_block * (KEYS * WIDTH);
#pragma unroll
  for (int i = 0; i < OWN_PIECES; i++) {
    int row = key + i * (THREADS / (OWN / VALUES));
    u8* place = image + row * 128 + ((piece / 2) ^ (row & 7)) * 16 + piece % 2 * 8;
    *reinterpret_cast<uint2*>(place) = quantize(Values::of(pieces[i]), scale);
  }
#pragma unroll
  for (int i = OWN_PIECES; i < KEY_PIECES; i++) {
    int row = rope_key + (i - OWN_PIECES) * (THREADS / (ROPE / VALUES));
    u8* place = image + KEYS * 128 + row * 64 + ((rope_piece / 2) ^ ((row >> 1) & 3)) * 16 + rope_piece % 2 * 8;
    *reinterpret_cast<uint2*>(place) = quantize(Values::of(pieces[i]), scale);
  }
}

// Four keys that lie together, and the first of 8 channels of their values: a thread has several, a warp eight by four neighbouring.
struct Quad {
  int index, channel;

  __device__ __forceinline__ Quad(int turn) {
    int of_warps = turn * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    index = of_warps / 4 * 8 + lane / 4;
    channel = (of_warps % 4 * 4 + lane % 4) * VALUES;
  }
};

__device__ __forceinline__ u32 pack_four(float a, float b, float c, float d) { return pack_e4m3(a, b) | pack_e4m3(c, d) << 16; }

__device__ __forceinline__ void quantize_values(const Arguments& given, Shared& memory, Block block, int head, long long at_block) {
  uint4 pieces[VALUE_PIECES];
  const u8* value = given.value + (long long)head * given.value_head + block.first_key * given.value_row;
#pragma unroll
  for (int i = 0; i < VALUE_PIECES; i++) {
    Quad quad(i / 4);
    int key = quad.index / 4 * 16 + quad.index % 4 * 2 + i % 2 + i % 4 / 2 * 8;
    pieces[i] = load_or_zero(value + key * given.value_row + quad.channel * 2, key < block.keys);
  }
  float scale = fmaxf(largest_of(pieces, memory.largest), SMALLEST_VALUE) / LARGEST_E4M3, inverse = 1.0f / scale;
  if (threadIdx.x == 0) given.scales[at_block].value_log2 = log2f(scale), given.scales[at_block].value_inverse = inverse;
#pragma unroll
  for (int i = 0; i < VALUE_PIECES; i += 4) {
    Quad quad(i / 4);
    Values keys[4] = {Values::of(pieces[i]), Values::of(pieces[i + 1]), Values::of(pieces[i + 2]), Values::of(pieces[i + 3])};
#pragma unroll
    for (int k = 0; k < VALUES; k++)
      memory.values[quad.channel + k][quad.index] = pack_four(keys[0].value[k] * inverse, keys[1].value[k] * inverse,
                                                              keys[2].value[k] * inverse, keys[3].value[k] * inverse);
  }
  __syncthreads();
  u8* image = given.values + at_block * (KEYS * VALUE);
  constexpr int UNITS = KEYS / 16;
#pragma unroll
  for (int at = threadIdx.x; at < VALUE * UNITS; at += THREADS) {
    int channel = at / UNITS, unit = at % UNITS;
    const u32* words = memory.values[channel] + unit * 4;
    u8* place = unit < 8 ? image + channel * 128 + (unit ^ (channel & 7)) * 16
                         : image + VALUE * 128 + channel * 32 + ((unit - 8) ^ ((channel >> 2) & 1)) * 16;
    *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) quantize_blocks(const __grid_constant__ Arguments given) {
  __shared__ Shared memory;
  Block block = given.blocks[blockIdx.y];
  int head = blockIdx.x / 2;
  long long at_block = (long long)head * given.block_count + blockIdx.y;
  if (blockIdx.x % 2)
    quantize_values(given, memory, block, head, at_block);
  else
    quantize_keys(given, memory, block, head, at_block);
}
