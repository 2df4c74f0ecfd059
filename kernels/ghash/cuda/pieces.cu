// GHASH (NIST SP 800-38D, 6.4) of pieces of a KV pool, as GMAC needs it: of a piece's bytes and then of its length in bits.
//
// A number of GF(2^128) is four words, of which the first one's highest bit is the coefficient of x^0. A product takes the 32
// digits of four bits of one factor from a table with the 16 multiples of the other: digits of the four words that stand at the
// same place are added, and then shifted together, so that a product has eight lookups of each word, seven shifts of eight words and
// one reduction, some 300 instructions. A CTA hashes a piece: a thread takes every 256th unit of 16 bytes, by Horner's rule with
// H^256, and the threads' sums are joined pair by pair with H, H^2, H^4 ... H^128. Reads each byte once.

using u32 = unsigned int;

constexpr int THREADS = 256, ENTRIES = 16;
// H, H^2, H^4 ... H^256.
constexpr int POWERS = 9;

struct Arguments {
  // [layers, blocks, units]
  const uint4* planes[2];
  int units[2];
  int blocks;
  // [pieces, 3]: layer, block, key
  const int* pieces;
  // [keys]
  const uint4* keys;
  // [pieces]; these three may lie in page-locked memory.
  uint4* hashes;
  // [keys, POWERS, ENTRIES]
  uint4* tables;
};

// Between 16 bytes and a number.
__device__ __forceinline__ uint4 swapped(uint4 x) {
  return make_uint4(__byte_perm(x.x, 0, 0x0123), __byte_perm(x.y, 0, 0x0123), __byte_perm(x.z, 0, 0x0123), __byte_perm(x.w, 0, 0x0123));
}

__device__ __forceinline__ uint4 added(uint4 x, uint4 y) { return make_uint4(x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w); }

__device__ __forceinline__ uint4 times_x(uint4 p) {
  u32 highest = p.w & 1 ? 0xE1000000u : 0;
  return make_uint4(p.x >> 1 ^ highest, __funnelshift_r(p.y, p.x, 1), __funnelshift_r(p.z, p.y, 1), __funnelshift_r(p.w, p.z, 1));
}

// Table: [ENTRIES], the factor's multiples.
__device__ __forceinline__ uint4 multiplied(uint4 x, const uint4* table) {
  u32 words[4] = {x.x, x.y, x.z, x.w}, product[8] = {};
#pragma unroll
  for (int place = 0; place < 32; place += 4) {
    if (place) {
#pragma unroll
      for (int i = 7; i; i--) product[i] = __funnelshift_r(product[i], product[i - 1], 4);
      product[0] >>= 4;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 multiple = table[words[i] >> place & 15];
      product[i] ^= multiple.x;
      product[i + 1] ^= multiple.y;
      product[i + 2] ^= multiple.z;
      product[i + 3] ^= multiple.w;
    }
  }
  // x^128 = 1 + x + x^2 + x^7. The lowest of the upper words comes last: the next one adds to it.
#pragma unroll
  for (int i = 3; i >= 0; i--) {
    u32 upper = product[4 + i];
    product[i] ^= upper ^ upper >> 1 ^ upper >> 2 ^ upper >> 7;
    product[i + 1] ^= upper << 31 ^ upper << 30 ^ upper << 25;
  }
  return make_uint4(product[0], product[1], product[2], product[3]);
}

// A warp makes a key's tables: a lane has an entry, and all lanes the power.
extern "C" __global__ void __launch_bounds__(32) fill_tables(const __grid_constant__ Arguments given) {
  __shared__ uint4 table[ENTRIES];
  int key = blockIdx.x, lane = threadIdx.x;
  uint4 power = swapped(given.keys[key]);
  for (int i = 0; i < POWERS; i++) {
    uint4 multiple = power, entry = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int bit = ENTRIES / 2; bit; bit /= 2) {
      if (lane & bit) entry = added(entry, multiple);
      multiple = times_x(multiple);
    }
    if (lane < ENTRIES) table[lane] = given.tables[(key * POWERS + i) * ENTRIES + lane] = entry;
    __syncwarp();
    power = multiplied(power, table);
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) hash_pieces(const __grid_constant__ Arguments given) {
  __shared__ uint4 tables[POWERS * ENTRIES], sums[THREADS];
  int thread = threadIdx.x;
  const int* piece = given.pieces + 3ll * blockIdx.x;
  if (thread < POWERS * ENTRIES) tables[thread] = given.tables[(long long)piece[2] * POWERS * ENTRIES + thread];
  long long row = (long long)piece[0] * given.blocks + piece[1];
  const uint4 *first = given.planes[0] + row * given.units[0], *second = given.planes[1] + row * given.units[1];
  int units = given.units[0] + given.units[1];
  __syncthreads();
  // The last thread has the last unit, the length. Before the first there may be units of zeros, which add nothing.
  uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int unit = thread - (THREADS - 1 - units % THREADS); unit <= units; unit += THREADS) {
    if (unit < 0) continue;
    uint4 own = make_uint4(0, units * 128u, 0, 0);
    if (unit < units) own = swapped(unit < given.units[0] ? first[unit] : second[unit - given.units[0]]);
    sum = added(multiplied(sum, tables + (POWERS - 1) * ENTRIES), own);
  }
#pragma unroll 1
  for (int power = 0; power < POWERS - 1; power++) {
    sums[thread] = sum;
    __syncthreads();
    if (thread < THREADS >> power + 1) sum = added(multiplied(sums[2 * thread], tables + power * ENTRIES), sums[2 * thread + 1]);
    __syncthreads();
  }
  if (thread == 0) given.hashes[blockIdx.x] = swapped(multiplied(sum, tables));
}
