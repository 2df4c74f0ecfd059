// Absorbed attention over selected tokens of a paged pool of bf16 latents, for Hopper (sm_90a).
//
// Dense decode attention (`mla_decode/cuda/bf16_decode.cu`) but for where latents come from: each query is a request of its own,
// whose blocks are 64 of its selected tokens. The copy engine cannot gather rows, so 128 threads copy them, 16 bytes at a time, a
// chunk's row by 8 neighbouring threads, and the CTAs of a query's two row tiles read every latent each.
//
// Bytes: 1,152 a token, once from memory and for each row tile from the second-level cache. FLOPs: 2 * 64 * (576 + 512) per token
// and row tile. A block is 36 copies a thread.

#include "../../mla_decode/cuda/bf16_roles.cuh"
#include "gather.cuh"

struct SelectedArguments {
  Arguments attention;
  Selection selection;
};

// Copies a query's held chunks into the ring, before the piece's first block. All producers arrive.
__device__ __forceinline__ void copy_held(Shared& shared, const TensorMap& map, const RingPosition& ring, long long row) {
#pragma unroll
  for (int i = 0; i < HELD_PAIRS; i++) {
    int slot = ring.slot_of(i), chunk = CHUNKS - HELD_CHUNKS + 2 * i;
    wait(&shared.empty[slot], ring.phase_of(i) ^ 1);
    if (threadIdx.x % PRODUCERS) {
      arrive(&shared.full[slot]);
      continue;
    }
    arrive_and_expect(&shared.full[slot], PAIR_BYTES);
    copy_box(shared.latents[slot], map, chunk * CHUNK * 2, row, &shared.full[slot]);
    copy_box(shared.latents[slot] + CHUNK_BYTES, map, (chunk + 1) * CHUNK * 2, row, &shared.full[slot]);
  }
}

// Copies a chunk's 64 rows: the thread has 16 bytes of four of them.
__device__ __forceinline__ void copy_chunk(u32 target, const u8* const (&rows)[4], int chunk) {
#pragma unroll
  for (int i = 0; i < 4; i++) copy_piece(target + i * 16 * 128, rows[i] + chunk * CHUNK * 2);
}

__device__ __forceinline__ void copy_block(Shared& shared, const RingPosition& ring, const u8* pool, const u32 (&place)[2]) {
  int row = threadIdx.x % PRODUCERS / 8, column = threadIdx.x % 8;
  const u8* rows[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    rows[i] = pool + (u64)(__shfl_sync(~0u, place[i / 2], row + i % 2 * 16) + column) * COPIED;
  u32 own = row * 128 + (column ^ (row & 7)) * 16;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    int slot = ring.slot_of(i), chunk = 2 * pair_at(i);
    u32 target = shared_address(shared.latents[slot]) + own;
    wait(&shared.empty[slot], ring.phase_of(i) ^ 1);
    copy_chunk(target, rows, chunk);
    copy_chunk(target + CHUNK_BYTES, rows, chunk + 1);
    arrive_when_copied(&shared.full[slot]);
  }
  wait(&shared.key_empty, (ring.count & 1) ^ 1);
  copy_chunk(shared_address(shared.key) + own, rows, CHUNKS - 1);
  arrive_when_copied(&shared.key_full);
}

// The producers: for every piece of the part, the query and the selected latents.
__device__ __forceinline__ void gather(Shared& shared, const SelectedArguments& given, const Place& place) {
  const Work& work = given.attention.work;
  RingPosition ring;
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = work.pieces[index];
    int selected = work.lengths[piece.request];
    if (index == place.part.begin) wait_for_queries();
    Places<WIDTH * 2> places(given.selection, piece.request, selected, piece.first);
    copy_held(shared, given.attention.query_boxes, ring, first_row_of(work, place, piece.request));
    ring.skip(HELD_PAIRS);
#pragma unroll 1
    for (int block = piece.first; block < piece.last; block++, ring.next()) {
      u32 own[2];
      places.take(own);
      copy_block(shared, ring, given.attention.pool, own);
      places.prefetch_next(given.attention.pool);
    }
  }
  finish_copies();
}

extern "C" __device__ int selected_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected(const __grid_constant__ SelectedArguments given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Work& work = given.attention.work;
  if (threadIdx.x == 0) prefetch_map(given.attention.query_boxes);
  init_barriers<1>(shared, PRODUCERS);
  __syncthreads();
  if (threadIdx.x < VALUE_THREADS) {
    take_registers<160>();
    add_values_of_part<1>(shared, given.attention, own_place<1>(work), __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  } else if (threadIdx.x < VALUE_THREADS + SCORE_THREADS) {
    take_registers<160>();
    score_part<1, true>(shared, given.attention, own_place<1>(work));
  } else {
    give_registers<32>();
    gather(shared, given, own_place<1>(work));
  }
}
