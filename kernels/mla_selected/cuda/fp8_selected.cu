// Absorbed attention over selected tokens of a paged pool of e4m3 latents, products in FP8, for Hopper (sm_90a).
//
// Dense decode attention (`mla_decode/cuda/fp8_decode.cu`) but for where latents come from: each query is a request of its own,
// whose blocks are 64 of its selected tokens. The copy engine cannot gather rows, so 128 threads copy them, 16 bytes at a time,
// and the CTAs of a query's two row tiles read every latent each.
//
// Bytes: 576 a token, once from memory and for each row tile from the second-level cache. FLOPs: 2 * 64 * (576 + 512) per token
// and row tile. A block is 18 copies a thread.

#include "../../mla_decode/cuda/fp8_roles.cuh"
#include "gather.cuh"

struct SelectedArguments {
  Arguments attention;
  Selection selection;
};

// Copies a piece's queries into two stages, before its first block. All producers arrive.
__device__ __forceinline__ void copy_queries(Shared& shared, const Arguments& given, Ring& ring, int request) {
  long long first = row_of(given.work, {request, 0, 0, -1}, shared.place.query_index, shared.place.first_head);
#pragma unroll 1
  for (int half = 0; half < 2; half++, ring.advance()) {
    u64* full = &shared.full[ring.stage];
    wait(&shared.empty[ring.stage], ring.phase ^ 1);
    if (threadIdx.x % PRODUCERS) {
      arrive(full);
      continue;
    }
    arrive_and_expect(full, TILE_BYTES);
#pragma unroll 1
    for (int box = 0; box < QUERY_BOXES / 2; box++)
      copy_box(shared.tiles[ring.stage] + box * BOX_BYTES, given.queries, (half * QUERY_BOXES / 2 + box) * BOX_CHANNELS * 2, first, full);
  }
}

// Copies 64 latents: of four of them the thread has 16 bytes of each 128, of two of them 16 bytes of the rope key.
__device__ __forceinline__ void copy_block(u8* tile, const u8* pool, const u32 (&place)[2]) {
  int row = threadIdx.x % PRODUCERS / 8, column = threadIdx.x % 8;
  u32 target = shared_address(tile) + row * 128 + (column ^ (row & 7)) * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u8* source = pool + (u64)(__shfl_sync(~0u, place[i / 2], row + i % 2 * 16) + column) * COPIED;
#pragma unroll
    for (int chunk = 0; chunk < LATENT / 128; chunk++) copy_piece(target + chunk * CHUNK_BYTES + i * 16 * 128, source + chunk * 128);
  }
  row = threadIdx.x % PRODUCERS / 4;
  column = threadIdx.x % 4;
  target = shared_address(tile) + ROPE_OFFSET + row * 64 + (column ^ ((row >> 1) & 3)) * 16;
#pragma unroll
  for (int half = 0; half < 2; half++)
    copy_piece(target + half * 32 * 64, pool + (u64)(__shfl_sync(~0u, place[half], row) + LATENT / COPIED + column) * COPIED);
}

// The producers: for every piece of the part, the query and the selected latents.
__device__ __forceinline__ void gather(Shared& shared, const SelectedArguments& given) {
  const Work& work = given.attention.work;
  const Place& place = shared.place;
  Ring ring;
  for (int index = place.part.begin; index < place.part.end; index++) {
    Piece piece = work.pieces[index];
    int selected = work.lengths[piece.request];
    if (index == place.part.begin) wait_for_queries();
    Places<WIDTH> places(given.selection, piece.request, selected, piece.first);
    copy_queries(shared, given.attention, ring, piece.request);
#pragma unroll 1
    for (int block = piece.first; block < piece.last; block++, ring.next()) {
      u32 own[2];
      places.take(own);
      wait(&shared.empty[ring.stage], ring.phase ^ 1);
      copy_block(shared.tiles[ring.stage], given.attention.pool, own);
      arrive_when_copied(&shared.full[ring.stage]);
      places.prefetch_next(given.attention.pool);
    }
  }
  finish_copies();
}

extern "C" __device__ int selected_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(THREADS, 1) selected(const __grid_constant__ SelectedArguments given) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) prefetch_map(given.attention.queries);
  init_barriers<1>(shared, PRODUCERS);
  if (threadIdx.x == 0) shared.place = own_place<1>(given.attention.work);
  __syncthreads();
  if (threadIdx.x < VALUE_THREADS) {
    take_registers<VALUE_REGISTERS>();
    add_values_of_part<1>(shared, given.attention, __shfl_sync(~0u, (int)threadIdx.x / 128, 0));
  } else if (threadIdx.x < VALUE_THREADS + SCORE_THREADS) {
    give_registers<SCORE_REGISTERS>();
    score_part<1, true>(shared, given.attention);
  } else {
    give_registers<PRODUCER_REGISTERS>();
    gather(shared, given);
  }
}
