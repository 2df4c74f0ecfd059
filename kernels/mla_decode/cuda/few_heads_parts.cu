// Absorbed attention of one query of each request with up to 24 heads over a paged pool of bf16 latents, for Hopper (sm_90a): its
// time is that of reading latents.
//
// Work. All blocks of all requests are divided into parts (`parts.cu`), one for each CTA. A tile of 64 heads, as `bf16_decode.cu` has,
// would be padded threefold. While a block is scored and added, the next one is on its way, and so is the next request's query.
//
// A CTA copies its first blocks before it waits, but those that earlier kernels may still write.
//
// Bytes: 1,152 a token. FLOPs: 2 * N * (576 + 512) per token.

#include "few_heads.cuh"

constexpr int QUERIES = 2;

// A place among the blocks of a part's pieces, in order.
struct Cursor {
  const Work& work;
  int index, end, block;
  Piece piece;

  __device__ __forceinline__ Cursor(const Work& work, Part part) : work(work), index(part.begin), end(part.end) { open(); }
  __device__ __forceinline__ bool there() const { return index < end; }
  __device__ __forceinline__ bool ready(int written) const { return there() && is_ready(block, work.lengths[piece.request], written); }
  __device__ __forceinline__ void open() {
    if (!there()) return;
    piece = work.pieces[index];
    block = piece.first;
  }
  // The block's place in the pool.
  __device__ __forceinline__ int place() const { return work.block_table[(long long)piece.request * work.table_stride + block]; }
  __device__ __forceinline__ void advance() {
    if (++block < piece.last) return;
    index++;
    open();
  }
};

template <int N>
struct PartAttention : Attention<N, QUERIES> {
  using Base = Attention<N, QUERIES>;
  using Base::head_of;
  using Base::OWN;
  using Base::warp;
  // Bytes of a head's values where they are staged, 16 more than a power of two.
  static constexpr int ROW_BYTES = LATENT * 2 + 16;
  Buffers<N, QUERIES>& shared;
  const Work& work;

  __device__ __forceinline__ PartAttention(Buffers<N, QUERIES>& shared, const Arguments& given)
      : Base{shared, given.pool_boxes, given.query_boxes, given.pool, given.scale_log2}, shared(shared), work(given.work) {}

  // Divides a piece's values by the sums of its weights, and stores both. The query has been read; the values lie in its place.
  __device__ __forceinline__ void finish(int query, const Piece& piece, Product<N> (&out)[MADE], const float (&reference)[OWN],
                                         const float (&total)[OWN]) const {
    static_assert(N * ROW_BYTES <= sizeof(shared.query[0]), "they fit there");
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 128) {
#pragma unroll
      for (int own = 0; own < OWN; own++) {
        float sum = column_sum(total[own]);
        if (lane < 4) shared.warp_total[warp()][head_of(own)] = sum;
        if (lane < 4 && warp() == 0) shared.alpha[head_of(own)] = reference[own];
      }
    }
    __syncthreads();
    float inverse[OWN];
#pragma unroll
    for (int own = 0; own < OWN; own++) inverse[own] = 1.0f / sum_of(head_of(own));
    u8* rows = shared.query[query][0];
#pragma unroll
    for (int tile = 0; tile < MADE; tile++) {
      int channel = (threadIdx.x / 128 * MADE + tile) * ELEMENTS + warp() * 16 + lane / 8 % 2 * 8;
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const float* sum = out[tile].sum + j * 4;
        store_transposed(shared_address(rows) + (j * 8 + lane % 8) * ROW_BYTES + channel * 2,
                         pack_bf16(sum[0] * inverse[j * 2], sum[1] * inverse[j * 2 + 1]),
                         pack_bf16(sum[2] * inverse[j * 2], sum[3] * inverse[j * 2 + 1]));
      }
    }
    __syncthreads();
    store(rows, piece);
    // The copy engine fills the place again.
    fence_async_proxy();
    __syncthreads();
  }

  __device__ __forceinline__ float sum_of(int head) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += shared.warp_total[i][head];
    return sum;
  }

  __device__ __forceinline__ void store(const u8* rows, const Piece& piece) const {
    constexpr int PIECES = LATENT * 2 / 16;
    long long first = row_of(work, piece, 0, 0);
    uint4* values = reinterpret_cast<uint4*>(piece.whole() ? work.out : work.values) + first * PIECES;
    for (int at = threadIdx.x; at < work.heads * PIECES; at += THREADS)
      values[at] = *reinterpret_cast<const uint4*>(rows + at / PIECES * ROW_BYTES + at % PIECES * 16);
    if (!piece.whole() && threadIdx.x < work.heads)
      work.log_sums[first + threadIdx.x] = shared.alpha[threadIdx.x] + __log2f(sum_of(threadIdx.x));
  }
};

template <int N>
__device__ __forceinline__ void attend(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  PartAttention<N> own(*reinterpret_cast<Buffers<N, QUERIES>*>(memory), given);
  const Work& work = given.work;
  Part part = work.part(blockIdx.x);
  Cursor now(work, part), next(work, part);
  int copied = 0;
  if (threadIdx.x == 0) {
    own.init();
    fence_async_proxy();
    for (; copied < STAGES && next.ready(given.written); next.advance()) own.copy_block(copied++, next.place());
  }
  __syncthreads();
  wait_for_earlier();
  start_next();
  if (threadIdx.x == 0) {
    if (now.there()) own.copy_query(0, now.piece.request * work.heads);
    for (; copied < STAGES && next.there(); next.advance()) own.copy_block(copied++, next.place());
  }
  __syncwarp();
  int turn = 0;
#pragma unroll 1
  for (int query = 0; now.there(); query++) {
    Product<N> out[MADE] = {};
    float reference[N / 4], total[N / 4] = {};
#pragma unroll
    for (int i = 0; i < N / 4; i++) reference[i] = LOWEST;
    Piece piece = now.piece;
    int length = work.lengths[piece.request];
    if (threadIdx.x == 0 && now.index + 1 < part.end)
      own.copy_query((query + 1) % QUERIES, work.pieces[now.index + 1].request * work.heads);
    __syncwarp();
    wait(&own.shared.query_full[query % QUERIES], query / QUERIES & 1);
#pragma unroll 1
    for (int block = piece.first; block < piece.last; block++, turn++) {
      int stage = turn % STAGES, left = length - block * BLOCK;
      wait(&own.shared.full[stage], turn / STAGES & 1);
      if (left <= BLOCK) own.mend(stage, now.place(), left);
      if (threadIdx.x < 128) own.score(stage, query % QUERIES, left, reference, total);
      fence_async_proxy();
      __syncthreads();
      own.add_values(stage, out, block == piece.first);
      // All warps have read the block and the probabilities.
      __syncthreads();
      if (threadIdx.x == 0 && next.there()) {
        own.copy_block(stage, next.place());
        next.advance();
      }
      __syncwarp();
      now.advance();
    }
    own.finish(query % QUERIES, piece, out, reference, total);
  }
}

// For up to N heads.
#define ATTEND(N)                                                                                                         \
  extern "C" __device__ int attend_parts_##N##_heads_shared_bytes = sizeof(Buffers<N, QUERIES>);                          \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_parts_##N##_heads(const __grid_constant__ Arguments given) { \
    attend<N>(given);                                                                                                     \
  }
ATTEND(16)
ATTEND(24)
