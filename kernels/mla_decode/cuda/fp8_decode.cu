// Absorbed decode attention over a paged pool of e4m3 latents, products in FP8, for Hopper (sm_90a).
//
// Work. 64 rows of the score matrix (64 heads of one query) meet all latents of a request: a unit is 128 tokens of them,
// two blocks. All units of all requests, laid end to end, are cut into equal parts, one for each CTA (times row tiles),
// so that ragged contexts fill the chip; a request cut by a border is written in pieces, which `combine` joins.
//
// One CTA: a producer warpgroup copies latents to shared memory (a block is contiguous in the pool), two consumer
// warpgroups compute. Of a unit each scores one block (S = Q K^T, both operands from shared memory) and leaves its
// probabilities there in e4m3; then each accumulates 256 of the 512 value channels over both blocks, transposed:
// O^T = V^T P^T. FP8 tensor cores want the summed dimension contiguous, which tokens of V are not: as the first operand,
// from registers, V^T needs no second copy, only a transposing load and a byte permutation. The permutation fixes an order
// of tokens within 16, and the scores' registers already lie in that order.
// The next unit's scores are issued before this unit's values, so that its softmax runs beside them.
//
// Bytes: 576 a token, read by both row tiles of 128 heads (the second time from the cache). FLOPs: 2 * 64 * (576 + 512)
// per token and row tile. Shared-memory bandwidth binds before the tensor cores: 43 KB a block per row tile.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int LATENT = 512, WIDTH = 576, BLOCK = 64, HEADS = 64, STAGES = 5;
constexpr int TILE_BYTES = BLOCK * WIDTH, ROPE_OFFSET = BLOCK * LATENT, CHUNK_BYTES = BLOCK * 128;
constexpr int CONSUMERS = 256, PRODUCERS = 128, LAG = 2;
// Units that the start and the end of a piece cost, about.
constexpr int PIECE_COST = 1;
constexpr float LOWEST = -1e30f;
// Probabilities are kept 256 times as large: e4m3 ends at 448, and its smallest steps are then far below the largest.
constexpr float LOG2_P = 8.0f;

struct Shared {
  u8 query[TILE_BYTES];
  u8 tiles[STAGES][TILE_BYTES];
  u8 probabilities[2][HEADS * BLOCK];
  float query_scale[HEADS];
  float largest[2][HEADS];
  float alpha[HEADS];
  float total[2][HEADS];
  u64 full[STAGES];
  u64 empty[STAGES];
};

struct Arguments {
  const u32* query;
  const u8* pool;
  const int* block_table;
  const int* lengths;
  u32* out;
  // Of cut requests: [parts + requests, query tokens, heads], by the part's and the request's index together.
  u32* pieces;
  float* log_sums;
  // Made by `schedule`: where each request's cost begins, [requests + 1]; its first and last part, [requests, 2].
  int* starts;
  int* borders;
  int requests, table_stride, query_tokens, heads, parts;
  float scale_log2, kv_scale;
};

struct Piece {
  int request, first, last;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra finished;\n bra again;\n finished:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ bool passed(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred done;\n mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Registers of products under way are neither read nor moved across this.
template <int N>
__device__ __forceinline__ void pin(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// K-major operands: 128-byte rows (SWIZZLE 1) or 64-byte rows (SWIZZLE 2), groups of 8 rows one after another.
template <int SWIZZLE>
__device__ __forceinline__ u64 descriptor(u32 address) {
  constexpr u64 group_bytes = SWIZZLE == 1 ? 1024 : 512;
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((group_bytes >> 4) << 32) | ((u64)SWIZZLE << 62);
}

#define ACCUMULATORS                                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define BIND(d)                                                                                                 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),   \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),    \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),   \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ACCUMULATORS ", %32, %33, p, 1, 1;\n}"
      : BIND(d) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ACCUMULATORS ", {%32, %33, %34, %35}, %36, 1, 1, 1;"
      : BIND(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
  unsigned short packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ int units_of(int length) { return (length + 2 * BLOCK - 1) / (2 * BLOCK); }

// Part p has the costs [p * total / parts, (p + 1) * total / parts).
__device__ __forceinline__ int part_of(int cost, int total, int parts) {
  return (int)(((long long)(cost + 1) * parts - 1) / total);
}

// The part's next piece from `request` on; false at its end.
__device__ __forceinline__ bool next_piece(const int* starts, int requests, int begin, int end, Piece& piece) {
  for (; piece.request < requests && starts[piece.request] < end; piece.request++) {
    int base = starts[piece.request] + PIECE_COST, units = starts[piece.request + 1] - base;
    piece.first = max(begin - base, 0);
    piece.last = min(end - base, units);
    if (piece.first < piece.last) return true;
  }
  return false;
}

struct Part {
  int begin, end, index;
  // Where there are more parts than units.
  __device__ __forceinline__ bool empty() const { return begin == end; }
};

__device__ __forceinline__ Part own_part(const int* starts, int requests, int parts, int index) {
  long long total = starts[requests];
  return {(int)(index * total / parts), (int)((index + 1) * total / parts), index};
}

__device__ __forceinline__ int first_request(const int* starts, int requests, int begin) {
  int low = 0, high = requests - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (starts[middle] <= begin) low = middle; else high = middle - 1;
  }
  return low;
}

// Copies a block's first `tokens` tokens, and zeros behind them, which meet probabilities of zero.
__device__ __forceinline__ void copy_tile(u8* tile, const u8* source, int tokens) {
  u32 base = shared_address(tile);
#pragma unroll 3
  for (int i = 0; i < TILE_BYTES / 16 / PRODUCERS; i++) {
    int piece = i * PRODUCERS + threadIdx.x - CONSUMERS, token = piece / (WIDTH / 16), column = piece % (WIDTH / 16);
    u32 latent = (column / 8) * CHUNK_BYTES + token * 128 + ((column % 8) ^ (token & 7)) * 16;
    u32 rope = ROPE_OFFSET + token * 64 + ((column % 4) ^ ((token >> 1) & 3)) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(base + (column < LATENT / 16 ? latent : rope)),
                 "l"(source + piece * 16), "r"(token < tokens ? 16 : 0) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// A tile is announced once it is there, up to LAG tiles later so that several are under way; at once where the next must
// wait for its stage, since consumers may need this one to free it.
struct Announcer {
  u64* full;
  int copied, announced;

  __device__ __forceinline__ void announce() {
    fence_async_proxy();
    arrive(&full[announced++ % STAGES]);
  }
  __device__ __forceinline__ void flush() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    while (announced < copied) announce();
  }
  __device__ __forceinline__ void next() {
    copied++;
    if (copied - announced <= LAG) return;
    asm volatile("cp.async.wait_group %0;" ::"n"(LAG) : "memory");
    announce();
  }
};

__device__ __forceinline__ void produce(Shared& shared, const Arguments& given, Part part) {
  Announcer tiles{shared.full, 0, 0};
  Piece piece{first_request(given.starts, given.requests, part.begin), 0, 0};
  for (; next_piece(given.starts, given.requests, part.begin, part.end, piece); piece.request++) {
    int length = given.lengths[piece.request];
    const int* blocks = given.block_table + (long long)piece.request * given.table_stride;
    for (int block = 2 * piece.first; block < 2 * piece.last; block++) {
      int stage = tiles.copied % STAGES, tokens = length - block * BLOCK;
      u32 parity = (tiles.copied / STAGES & 1) ^ 1;
      if (!passed(&shared.empty[stage], parity)) {
        tiles.flush();
        wait(&shared.empty[stage], parity);
      }
      const u8* source = tokens > 0 ? given.pool + (long long)blocks[block] * TILE_BYTES : given.pool;
      copy_tile(shared.tiles[stage], source, tokens);
      tiles.next();
    }
  }
  tiles.flush();
}

// 64 queries of 576 bf16 to e4m3, a scale for each: a warp does 8.
__device__ __forceinline__ void load_query(Shared& shared, const u32* query) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 2
  for (int head = warp * 8; head < warp * 8 + 8; head++) {
    float low[WIDTH / 64], high[WIDTH / 64], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) {
      u32 pair = query[head * (WIDTH / 2) + i * 32 + lane];
      low[i] = __uint_as_float(pair << 16);
      high[i] = __uint_as_float(pair & 0xFFFF0000u);
      largest = fmaxf(largest, fmaxf(fabsf(low[i]), fabsf(high[i])));
    }
#pragma unroll
    for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    float scale = fmaxf(largest, 1e-10f) / 448.0f, inverse = 1.0f / scale;
    if (lane == 0) shared.query_scale[head] = scale;
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++) {
      int byte = i * 64 + lane * 2, column = byte / 16;
      int latent = (column / 8) * CHUNK_BYTES + head * 128 + ((column % 8) ^ (head & 7)) * 16;
      int rope = ROPE_OFFSET + head * 64 + ((column % 4) ^ ((head >> 1) & 3)) * 16;
      int offset = (i < LATENT / 64 ? latent : rope) + byte % 16;
      *reinterpret_cast<unsigned short*>(shared.query + offset) = pack_e4m3(low[i] * inverse, high[i] * inverse);
    }
  }
}

// S = Q K^T of one block, not waited for.
__device__ __forceinline__ void score(float (&scores)[32], u32 query, u32 tile) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < LATENT / 32; step++) {
    u32 offset = (step / 4) * CHUNK_BYTES + (step % 4) * 32;
    multiply(scores, descriptor<1>(query + offset), descriptor<1>(tile + offset), step > 0);
  }
#pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 offset = ROPE_OFFSET + step * 32;
    multiply(scores, descriptor<2>(query + offset), descriptor<2>(tile + offset), 1);
  }
  wgmma_commit();
}

// 32 tokens by 16 channels of each of the warpgroup's four groups of 64 channels, transposed.
__device__ __forceinline__ void load_values(u32 (&values)[4][4], u32 tile, int step) {
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, token = step * 32 + lane;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    int column = group * 16 + m * 4 + warp;
    u32 address = tile + (column / 8) * CHUNK_BYTES + token * 128 + ((column % 8) ^ (token & 7)) * 16;
    u32 r0, r1, r2, r3;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(address) : "memory");
    values[m][0] = __byte_perm(r0, r1, 0x6420);
    values[m][1] = __byte_perm(r0, r1, 0x7531);
    values[m][2] = __byte_perm(r2, r3, 0x6420);
    values[m][3] = __byte_perm(r2, r3, 0x7531);
  }
}

// O^T += V^T P^T over 32 tokens of one block, not waited for.
__device__ __forceinline__ void accumulate(float (&out)[4][32], u32 (&values)[4][4], u32 tile, u32 probabilities, int step) {
  load_values(values, tile, step);
  wgmma_fence();
#pragma unroll
  for (int m = 0; m < 4; m++) multiply(out[m], values[m], descriptor<2>(probabilities + step * 32));
  wgmma_commit();
}

struct Softmax {
  // Of the thread's two rows of its warpgroup's scores: the running maximum (log2), this warpgroup's share of the sum, and
  // by how much the last unit made both smaller.
  float largest[2], total[2], alpha[2];
  // The last unit's probabilities, not stored yet: 4 tokens a word, as the permutation orders them.
  u32 packed[8];
};

// The unit's scores, one block here and one in the other warpgroup, to probabilities; the warpgroups meet once.
__device__ __forceinline__ void soften(
    Shared& shared, float (&scores)[32], Softmax& state, const float (&scale)[2], int tokens) {
  int group = threadIdx.x / 128, lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, pair = lane % 4;
  float own[2] = {LOWEST, LOWEST}, shift[2];
#pragma unroll
  for (int i = 0; i < 32; i++) {
    int half = i / 2 % 2, token = i / 4 * 8 + pair * 2 + i % 2;
    scores[i] = token < tokens ? scores[i] * scale[half] : -__int_as_float(0x7F800000);
    own[half] = fmaxf(own[half], scores[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    own[half] = fmaxf(own[half], __shfl_xor_sync(~0u, own[half], 1));
    own[half] = fmaxf(own[half], __shfl_xor_sync(~0u, own[half], 2));
    if (pair == 0) shared.largest[group][row + half * 8] = own[half];
  }
  consumers_meet();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float before = state.largest[half];
    state.largest[half] = fmaxf(before, fmaxf(own[half], shared.largest[group ^ 1][row + half * 8]));
    state.alpha[half] = exp2_fast(before - state.largest[half]);
    state.total[half] *= state.alpha[half];
    shift[half] = LOG2_P - state.largest[half];
  }
#pragma unroll
  for (int i = 0; i < 32; i++) {
    scores[i] = exp2_fast(scores[i] + shift[i / 2 % 2]);
    state.total[i / 2 % 2] += scores[i];
  }
#pragma unroll
  for (int word = 0; word < 8; word++) {
    int i = word / 2 * 8 + word % 2 * 2;
    state.packed[word] = pack_e4m3(scores[i], scores[i + 1]) | pack_e4m3(scores[i + 4], scores[i + 5]) << 16;
    // Here, beside the products under way, and not sunk behind the wait for them.
    asm volatile("" : "+r"(state.packed[word])::"memory");
  }
}

// Once no product reads the unit before's: probabilities to shared memory, for both warpgroups. They meet twice.
__device__ __forceinline__ void store_probabilities(Shared& shared, const Softmax& state) {
  int group = threadIdx.x / 128, lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, pair = lane % 4;
  consumers_meet();
#pragma unroll
  for (int word = 0; word < 8; word++) {
    int head = row + word % 2 * 8;
    u8* target = shared.probabilities[group] + head * 64 + (word / 2 ^ ((head >> 1) & 3)) * 16 + pair * 4;
    *reinterpret_cast<u32*>(target) = state.packed[word];
  }
  if (pair == 0 && group == 0) {
    shared.alpha[row] = state.alpha[0];
    shared.alpha[row + 8] = state.alpha[1];
  }
  fence_async_proxy();
  consumers_meet();
}

__device__ __forceinline__ void rescale(Shared& shared, float (&out)[4][32]) {
  int pair = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float2 alpha = *reinterpret_cast<float2*>(&shared.alpha[i * 8 + pair * 2]);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      out[m][i * 4] *= alpha.x;
      out[m][i * 4 + 1] *= alpha.y;
      out[m][i * 4 + 2] *= alpha.x;
      out[m][i * 4 + 3] *= alpha.y;
    }
  }
}

// O^T over the sum, to [64 heads, 512] bf16; the base-2 logarithm of the sum beside it where it is a piece.
__device__ __forceinline__ void finish(
    Shared& shared, const float (&out)[4][32], Softmax& state, float kv_scale, u32* target, float* log_sums) {
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, pair = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    state.total[half] += __shfl_xor_sync(~0u, state.total[half], 1);
    state.total[half] += __shfl_xor_sync(~0u, state.total[half], 2);
    int head = warp * 16 + lane / 4 + half * 8;
    if (pair == 0) shared.total[group][head] = state.total[half];
    if (pair == 0 && group == 0) shared.largest[0][head] = state.largest[half];
  }
  consumers_meet();
  if (log_sums && threadIdx.x < HEADS) {
    float total = shared.total[0][threadIdx.x] + shared.total[1][threadIdx.x];
    log_sums[threadIdx.x] = total > 0.0f ? shared.largest[0][threadIdx.x] + __log2f(total) : LOWEST;
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int head = i / 2 * 8 + pair * 2 + i % 2;
    float total = shared.total[0][head] + shared.total[1][head];
    float inverse = total > 0.0f ? kv_scale / total : 0.0f;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      int channel = group * 256 + m * 64 + warp * 16 + lane / 4 * 2, at = i / 2 * 4 + i % 2;
      target[(head * LATENT + channel) / 2] = pack_bf16(out[m][at] * inverse, out[m][at + 2] * inverse);
    }
  }
}

struct Consumer {
  int group, seen;
  __device__ __forceinline__ int stage(int block) const { return (seen + block) % STAGES; }
  __device__ __forceinline__ u32 parity(int block) const { return (seen + block) / STAGES & 1; }
};

__device__ __forceinline__ u32 arrived_tile(Shared& shared, const Consumer& own, int block) {
  wait(&shared.full[own.stage(block)], own.parity(block));
  return shared_address(shared.tiles[own.stage(block)]);
}

__device__ __forceinline__ void release_tile(Shared& shared, const Consumer& own, int block) {
  if (threadIdx.x % 128 == 0) arrive(&shared.empty[own.stage(block)]);
}

__device__ __forceinline__ void pin_all(float (&out)[4][32]) {
#pragma unroll
  for (int m = 0; m < 4; m++) pin(out[m]);
}

// O^T += V^T P^T over a unit. Leaves the second block's products under way, and all else done.
__device__ __forceinline__ void accumulate_unit(Shared& shared, const Consumer& own, int unit, float (&out)[4][32]) {
  u32 values[2][4][4], probabilities = shared_address(shared.probabilities);
  u32 first = arrived_tile(shared, own, 2 * unit), second = arrived_tile(shared, own, 2 * unit + 1);
  pin_all(out);
  accumulate(out, values[0], first, probabilities, 0);
  accumulate(out, values[1], first, probabilities, 1);
  wgmma_wait<1>();
  accumulate(out, values[0], second, probabilities + HEADS * BLOCK, 0);
  wgmma_wait<1>();
  release_tile(shared, own, 2 * unit);
  accumulate(out, values[1], second, probabilities + HEADS * BLOCK, 1);
}

__device__ __forceinline__ void finish_unit(Shared& shared, const Consumer& own, int unit, float (&out)[4][32]) {
  wgmma_wait<0>();
  pin_all(out);
  release_tile(shared, own, 2 * unit + 1);
}

// One piece, of which this query sees `tokens` tokens. Leaves O^T and the softmax's state.
__device__ __forceinline__ void attend(
    Shared& shared, Consumer& own, int units, int tokens, float factor, float (&out)[4][32], Softmax& state) {
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, left = tokens - own.group * BLOCK;
  float scale[2] = {shared.query_scale[row] * factor, shared.query_scale[row + 8] * factor};
  u32 query = shared_address(shared.query);
  float scores[32];
  score(scores, query, arrived_tile(shared, own, own.group));
  wgmma_wait<0>();
  pin(scores);
  soften(shared, scores, state, scale, left);
#pragma unroll 1
  for (int unit = 0; unit < units - 1; unit++) {
    score(scores, query, arrived_tile(shared, own, 2 * unit + 2 + own.group));
    store_probabilities(shared, state);
    rescale(shared, out);
    accumulate_unit(shared, own, unit, out);
    pin(scores);
    left -= 2 * BLOCK;
    soften(shared, scores, state, scale, left);
    finish_unit(shared, own, unit, out);
  }
  store_probabilities(shared, state);
  rescale(shared, out);
  accumulate_unit(shared, own, units - 1, out);
  finish_unit(shared, own, units - 1, out);
  own.seen += 2 * units;
}

__device__ __forceinline__ void consume(Shared& shared, const Arguments& given, Part part, int row_tile) {
  int tiles = given.heads / HEADS, query_index = row_tile / tiles, first_head = row_tile % tiles * HEADS;
  Consumer own{(int)threadIdx.x / 128, 0};
  Piece piece{first_request(given.starts, given.requests, part.begin), 0, 0};
  for (; next_piece(given.starts, given.requests, part.begin, part.end, piece); piece.request++) {
    long long token = (long long)piece.request * given.query_tokens + query_index;
    long long at = token * given.heads + first_head;
    consumers_meet();
    load_query(shared, given.query + at * (WIDTH / 2));
    fence_async_proxy();
    consumers_meet();
    int seen = given.lengths[piece.request] - given.query_tokens + 1 + query_index;
    float out[4][32] = {};
    Softmax state{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}, {}};
    int tokens = seen - piece.first * 2 * BLOCK;
    attend(shared, own, piece.last - piece.first, tokens, given.scale_log2 * given.kv_scale, out, state);
    bool whole = given.borders[2 * piece.request] == given.borders[2 * piece.request + 1];
    long long slot = (long long)(part.index + piece.request) * given.query_tokens + query_index;
    long long piece_at = slot * given.heads + first_head;
    finish(shared, out, state, given.kv_scale, whole ? given.out + at * (LATENT / 2) : given.pieces + piece_at * (LATENT / 2),
           whole ? nullptr : given.log_sums + piece_at);
  }
}

// One warp, once a step: how the work of all requests is cut into parts.
extern "C" __global__ void schedule(const __grid_constant__ Arguments given) {
  int lane = threadIdx.x, before = 0;
  for (int base = 0; base < given.requests; base += 32) {
    int request = base + lane, cost = request < given.requests ? units_of(given.lengths[request]) + PIECE_COST : 0;
    int sum = cost;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (request < given.requests) given.starts[request] = before + sum - cost;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) given.starts[given.requests] = before;
  __syncwarp();
  for (int request = lane; request < given.requests; request += 32) {
    given.borders[2 * request] = part_of(given.starts[request] + PIECE_COST, before, given.parts);
    int next = request + 1 < given.requests ? given.starts[request + 1] : before;
    given.borders[2 * request + 1] = part_of(next - 1, before, given.parts);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) decode(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(&shared.full[stage], PRODUCERS);
      init_barrier(&shared.empty[stage], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int row_tiles = given.query_tokens * given.heads / HEADS;
  Part part = own_part(given.starts, given.requests, given.parts, blockIdx.x / row_tiles);
  if (threadIdx.x < CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(shared, given, part, blockIdx.x % row_tiles);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    produce(shared, given, part);
  }
}

// Joins the pieces of requests that a border cuts. A warp does one head; reads and writes 2 bytes a value.
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Arguments given) {
  int token = blockIdx.x, request = token / given.query_tokens, lane = threadIdx.x % 32;
  int head = blockIdx.y * 8 + threadIdx.x / 32;
  int first = given.borders[2 * request], last = given.borders[2 * request + 1];
  if (first == last || head >= given.heads) return;
  float largest = LOWEST, total = 0.0f, sum[16] = {};
  for (int part = first; part <= last; part++) {
    if (own_part(given.starts, given.requests, given.parts, part).empty()) continue;
    long long slot = ((long long)(part + request) * given.query_tokens + token % given.query_tokens) * given.heads + head;
    largest = fmaxf(largest, given.log_sums[slot]);
  }
  for (int part = first; part <= last; part++) {
    if (own_part(given.starts, given.requests, given.parts, part).empty()) continue;
    long long slot = ((long long)(part + request) * given.query_tokens + token % given.query_tokens) * given.heads + head;
    float weight = exp2_fast(given.log_sums[slot] - largest);
    total += weight;
    const uint4* values = reinterpret_cast<const uint4*>(given.pieces + slot * (LATENT / 2));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint4 packed = values[i * 32 + lane];
      u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int word = 0; word < 4; word++) {
        sum[i * 8 + word * 2] += weight * __uint_as_float(words[word] << 16);
        sum[i * 8 + word * 2 + 1] += weight * __uint_as_float(words[word] & 0xFFFF0000u);
      }
    }
  }
  uint4* target = reinterpret_cast<uint4*>(given.out + ((long long)token * given.heads + head) * (LATENT / 2));
  float inverse = 1.0f / total;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 packed;
    packed.x = pack_bf16(sum[i * 8] * inverse, sum[i * 8 + 1] * inverse);
    packed.y = pack_bf16(sum[i * 8 + 2] * inverse, sum[i * 8 + 3] * inverse);
    packed.z = pack_bf16(sum[i * 8 + 4] * inverse, sum[i * 8 + 5] * inverse);
    packed.w = pack_bf16(sum[i * 8 + 6] * inverse, sum[i * 8 + 7] * inverse);
    target[i * 32 + lane] = packed;
  }
}

