// Absorbed decode attention over a paged pool of e4m3 latents, products in FP8, for Hopper (sm_90a).
//
// Work. A CTA computes 64 rows of the score matrix (64 heads of one query, or as many as there are) against the latents of a
// request, a unit of 128 tokens, two blocks, at a time. All units of all requests are divided into parts (`parts.cu`), one for
// each CTA (times row tiles), so that ragged contexts fill the chip. `combine` joins the pieces of split requests.
//
// Roles in a CTA: a producer warpgroup copies latents to shared memory (a block is contiguous in the pool), two consumer
// warpgroups compute. For each unit, each consumer scores one block (S = Q K^T, both operands from shared memory) and leaves
// its probabilities there in e4m3. Then each accumulates 256 of the 512 value channels over both blocks, transposed: O^T = V^T
// P^T. FP8 tensor cores want the summed dimension contiguous, and tokens of V are not. As the first operand, from registers,
// V^T needs no second copy, only a transposing load and a byte permutation. The permutation fixes an order of tokens within 16,
// and the scores' registers already have that order. The next unit's scores are issued before this unit's values, so that its
// softmax runs beside their products.
//
// Bytes: 576 a token, read by both row tiles of 128 heads (the second time from the cache). FLOPs: 2 * 64 * (576 + 512)
// per token and row tile. Shared memory is the limit, not the tensor cores: a block and row tile read and write 172 KB of it,
// 1,376 cycles, where the products take 1,088.

#include "../../cuda/registers.cuh"
#include "fp8_attend.cuh"

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

// O^T += V^T P^T over a unit. On return only the second block's products are still in flight.
__device__ __forceinline__ void accumulate_unit(Shared& shared, const Consumer& own, int unit, float (&out)[4][32]) {
  u32 values[2][4][4], probabilities = shared_address(shared.probabilities);
  u32 first = arrived_tile(shared, own, 2 * unit), second = arrived_tile(shared, own, 2 * unit + 1);
  pin_all(out);
  accumulate(out, values[0], first, probabilities, 0, own.group);
  accumulate(out, values[1], first, probabilities, 1, own.group);
  wgmma_wait<1>();
  accumulate(out, values[0], second, probabilities + HEADS * BLOCK, 0, own.group);
  wgmma_wait<1>();
  release_tile(shared, own, 2 * unit);
  accumulate(out, values[1], second, probabilities + HEADS * BLOCK, 1, own.group);
}

__device__ __forceinline__ void finish_unit(Shared& shared, const Consumer& own, int unit, float (&out)[4][32]) {
  wgmma_wait<0>();
  pin_all(out);
  release_tile(shared, own, 2 * unit + 1);
}

// Attends to one piece, of which this query sees `tokens` tokens. Leaves O^T and the softmax's state.
__device__ __forceinline__ void attend(
    Shared& shared, Consumer& own, int units, int tokens, float factor, float (&out)[4][32], Softmax& state) {
  int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, left = tokens - own.group * BLOCK;
  float scale[2] = {shared.query_scale[row] * factor, shared.query_scale[row + 8] * factor};
  u32 query = shared_address(shared.query);
  float scores[32];
  score(scores, query, arrived_tile(shared, own, own.group));
  wgmma_wait<0>();
  pin(scores);
  to_probabilities(shared, scores, state, scale, left, own.group);
#pragma unroll 1
  for (int unit = 0; unit < units - 1; unit++) {
    score(scores, query, arrived_tile(shared, own, 2 * unit + 2 + own.group));
    store_probabilities(shared, state, own.group);
    rescale(shared, out);
    accumulate_unit(shared, own, unit, out);
    pin(scores);
    left -= 2 * BLOCK;
    to_probabilities(shared, scores, state, scale, left, own.group);
    finish_unit(shared, own, unit, out);
  }
  store_probabilities(shared, state, own.group);
  rescale(shared, out);
  accumulate_unit(shared, own, units - 1, out);
  finish_unit(shared, own, units - 1, out);
  own.seen += 2 * units;
}

template <bool WHOLE_TILES>
__device__ __forceinline__ void consume(Shared& shared, const Arguments& given, const Part& part, int row_tile) {
  const Work& work = given.work;
  int tiles = (work.heads + HEADS - 1) / HEADS, query_index = row_tile / tiles, first_head = row_tile % tiles * HEADS;
  Consumer own{__shfl_sync(~0u, (int)threadIdx.x / 128, 0), 0};
  for (int index = part.begin; index < part.end; index++) {
    Piece piece = work.pieces[index];
    long long at = ((long long)piece.request * work.query_tokens + query_index) * work.heads + first_head;
    consumers_meet();
    load_query(shared, given.query + at * (WIDTH / 2));
    fence_async_proxy();
    consumers_meet();
    int seen = work.lengths[piece.request] - work.query_tokens + 1 + query_index;
    float out[4][32] = {};
    Softmax state{{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}, {}};
    int tokens = seen - piece.first * 2 * BLOCK;
    attend(shared, own, piece.last - piece.first, tokens, given.scale_log2 * given.kv_scale, out, state);
    long long target = row_of(work, piece, query_index, first_head);
    finish<WHOLE_TILES>(shared, out, state, given.kv_scale,
                        (piece.whole() ? work.out : work.values) + target * (LATENT / 2),
                        piece.whole() ? nullptr : work.log_sums + target, own.group);
  }
}

template <bool WHOLE_TILES>
__device__ __forceinline__ void attend_part(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Work& work = given.work;
  int tiles = (work.heads + HEADS - 1) / HEADS, row_tiles = work.row_tiles();
  if (threadIdx.x == 0) {
    shared.heads = min(work.heads - blockIdx.x % tiles * HEADS, HEADS);
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(&shared.full[stage], PRODUCERS);
      init_barrier(&shared.empty[stage], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_earlier();
  start_next();
  Part part = work.part(blockIdx.x / row_tiles);
  if (threadIdx.x < CONSUMERS) {
    take_registers<232>();
    consume<WHOLE_TILES>(shared, given, part, blockIdx.x % row_tiles);
  } else {
    give_registers<40>();
    produce(shared, given, part);
  }
}

extern "C" __device__ int decode_shared_bytes = sizeof(Shared), decode_rest_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Arguments given) {
  attend_part<true>(given);
}

// For heads that are no multiple of 64. A kernel of its own, since the check would cost the other one registers.
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_rest(const __grid_constant__ Arguments given) {
  attend_part<false>(given);
}
