// The products around absorbed attention for few tokens, for Hopper (sm_90a). Their time is that of reading the weights, 2
// bytes for 2 operations a token, and the activations, which at 96 tokens are as many bytes.
//
// No kernel of a step writes weights. So all weights are copied to shared memory while the previous kernel still runs
// (programmatic dependent launch), a head's weights in one or two CTAs, as many CTAs as the chip holds at once. The tensor
// cores' 64 rows hold outputs and N holds tokens, without padding if there are 16, 32, 64, 96 or 128.

#include "expand.cuh"
#include "latents.cuh"

constexpr int ROPE = WIDTH - LATENT;

__device__ __forceinline__ void warpgroup_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

struct AbsorbArguments {
  // A box is NOPE rows of the weight, or the kernel's number of tokens of the queries.
  TensorMap weight, query;
  const u32* rope;
  const float2* rotations;
  u8* out;
  int tokens, heads, head_rows, head_bytes;
  // Strides of the queries' rope part, in words of 4 bytes.
  int token_words, head_words;
  // If latents are written, CTAs of one more head do that.
  LatentArguments written;
};

// A CTA computes one of PARTS parts of the latent, for one head, whose queries have NOPE channels that are not rotated. With two
// parts its warpgroups have two tiles each. With eight a CTA has one tile and one warpgroup: few heads then have more CTAs, which
// leave room for those of attention, whose copies begin meanwhile.
template <int TOKENS, int NOPE, int PARTS>
struct AbsorbShape {
  static constexpr int TILES = LATENT / PARTS / ELEMENTS, GROUPS = TILES > 1 ? 2 : 1, TILES_OF_GROUP = TILES / GROUPS;
  static constexpr int THREADS = GROUPS * 128, WARPS = THREADS / 32;
  // Tokens that a warp rotates.
  static constexpr int ROTATED = (TOKENS + PARTS * WARPS - 1) / (PARTS * WARPS);
};

template <int TOKENS, int NOPE, int PARTS>
struct AbsorbShared {
  static constexpr int TILES = AbsorbShape<TOKENS, NOPE, PARTS>::TILES;
  u8 weight[TILES][NOPE * LINE];
  u8 query[NOPE / ELEMENTS][TOKENS * LINE];
  u64 weight_full[TILES], query_full;
};

// A thread's share of the queries' rope part, and its rotations.
template <int COUNT>
struct Pairs {
  u32 found[COUNT];
  float2 turns[COUNT];
};

template <int TOKENS, int NOPE, int PARTS>
struct Absorb {
  static_assert(TOKENS * LINE <= NOPE * LINE, "a tile's results fit where its weight was");
  using Of = AbsorbShape<TOKENS, NOPE, PARTS>;
  static constexpr int TILES = Of::TILES;
  AbsorbShared<TOKENS, NOPE, PARTS>& shared;
  const AbsorbArguments& given;
  int part, head, first;

  __device__ __forceinline__ void copy_weight() const {
    for (int tile = 0; tile < TILES; tile++) init_barrier(&shared.weight_full[tile], 1);
    init_barrier(&shared.query_full, 1);
    fence_async_proxy();
    for (int tile = 0; tile < TILES; tile++) {
      arrive_and_expect(&shared.weight_full[tile], sizeof(shared.weight[tile]));
      copy_box(shared.weight[tile], given.weight, (part * TILES + tile) * LINE, head * given.head_rows,
               &shared.weight_full[tile]);
    }
    prefetch_map(given.query);
  }

  __device__ __forceinline__ void copy_query() const {
    arrive_and_expect(&shared.query_full, sizeof(shared.query));
    for (int i = 0; i < NOPE / ELEMENTS; i++)
      copy_box(shared.query[i], given.query, head * given.head_bytes + i * LINE, first, &shared.query_full);
  }

  // The token that this warp rotates, if it is there: a head's CTAs take turns.
  __device__ __forceinline__ int rotated(int i) const {
    return first + (i * Of::WARPS + threadIdx.x / 32) * PARTS + part;
  }
  __device__ __forceinline__ bool rotates(int i) const { return rotated(i) < min(first + TOKENS, given.tokens); }

  __device__ __forceinline__ void load_pairs(Pairs<Of::ROTATED>& pairs) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Of::ROTATED; i++) {
      long long token = min(rotated(i), given.tokens - 1);
      pairs.found[i] = given.rope[token * given.token_words + head * given.head_words + lane];
      pairs.turns[i] = given.rotations[token * (ROPE / 2) + lane];
    }
  }

  __device__ __forceinline__ void rotate(const Pairs<Of::ROTATED>& pairs) const {
#pragma unroll
    for (int i = 0; i < Of::ROTATED; i++) {
      float x = __uint_as_float(pairs.found[i] << 16), y = __uint_as_float(pairs.found[i] & 0xFFFF0000u);
      float2 turn = pairs.turns[i];
      if (rotates(i))
        reinterpret_cast<u32*>(row(rotated(i)) + LATENT * 2)[threadIdx.x % 32] =
            pack_bf16(x * turn.x - y * turn.y, x * turn.y + y * turn.x);
    }
  }

  __device__ __forceinline__ u8* row(int token) const {
    return given.out + ((long long)token * given.heads + head) * (WIDTH * 2);
  }

  __device__ __forceinline__ void make_tile(int tile) const {
    float sum[TOKENS / 2];
    u32 weight = shared_address(shared.weight[tile]), query = shared_address(shared.query);
    wait(&shared.weight_full[tile], 0);
    wait(&shared.query_full, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < NOPE / 16; step++) {
      u32 right = query + step / 4 * (TOKENS * LINE) + step % 4 * 32;
      multiply_step<1>(sum, descriptor<1>(weight + step * 16 * LINE), descriptor<1>(right), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(sum);
    store_tile(tile, sum);
  }

  // Where eight outputs of a token lie, where the weight of their tile was: in different banks for tokens that follow each other.
  __device__ __forceinline__ u8* made(int tile, int token, int eight) const {
    return shared.weight[tile] + token * LINE + (eight ^ (token & 7)) * 16;
  }

  // Stores through shared memory, so that whole lines are written.
  __device__ __forceinline__ void store_tile(int tile, const float (&sum)[TOKENS / 2]) const {
    int thread = threadIdx.x % 128, group = threadIdx.x / 128, lane = threadIdx.x % 32;
    int output = thread / 32 * 16 + lane / 8 % 2 * 8;
    // Wait until all warps have read the weight.
    warpgroup_meets(group);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
      store_transposed(shared_address(made(tile, j * 8 + lane % 8, output / 8)),
                       pack_bf16(sum[j * 4], sum[j * 4 + 1]), pack_bf16(sum[j * 4 + 2], sum[j * 4 + 3]));
    warpgroup_meets(group);
#pragma unroll
    for (int i = 0; i < TOKENS / 16; i++) {
      int token = thread / 8 + i * 16, eight = thread % 8;
      if (first + token < given.tokens)
        *reinterpret_cast<uint4*>(row(first + token) + (part * TILES + tile) * LINE + eight * 16) =
            *reinterpret_cast<const uint4*>(made(tile, token, eight));
    }
  }
};

template <int TOKENS, int NOPE, int PARTS>
__device__ __forceinline__ void absorb(const AbsorbArguments& given) {
  using Of = AbsorbShape<TOKENS, NOPE, PARTS>;
  extern __shared__ __align__(1024) u8 memory[];
  start_next();
  Absorb<TOKENS, NOPE, PARTS> work{*reinterpret_cast<AbsorbShared<TOKENS, NOPE, PARTS>*>(memory), given, (int)blockIdx.x,
                                   (int)blockIdx.y, (int)blockIdx.z * TOKENS};
  if (work.head == given.heads) {
    wait_for_earlier();
    for (int i = 0; i < Of::ROTATED; i++)
      if (work.rotates(i)) write_latent(given.written, given.rotations, work.rotated(i));
    return;
  }
  if (threadIdx.x == 0) work.copy_weight();
  __syncthreads();
  wait_for_earlier();
  if (threadIdx.x == 0) work.copy_query();
  __syncwarp();
  Pairs<Of::ROTATED> pairs;
  work.load_pairs(pairs);
#pragma unroll
  for (int i = 0; i < Of::TILES_OF_GROUP; i++) work.make_tile(threadIdx.x / 128 * Of::TILES_OF_GROUP + i);
  work.rotate(pairs);
}

template <int TOKENS>
__device__ __forceinline__ void expand(const ExpandArguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  start_next();
  Expand<TOKENS> work{*reinterpret_cast<ExpandShared<TOKENS>*>(memory), given, (int)blockIdx.x, (int)blockIdx.y * TOKENS};
  if (threadIdx.x == 0) work.copy_weight();
  __syncthreads();
  wait_for_earlier();
  if (threadIdx.x == 0) work.copy_attended();
  __syncwarp();
  float sum[TOKENS / 2];
  work.template multiply_chunks<true>(sum);
  work.store(sum);
}

#define ABSORB(TOKENS, NOPE, PARTS)                                                                                     \
  extern "C" __device__ int few_tokens_absorb_queries_##NOPE##_##TOKENS##_in_##PARTS##_shared_bytes =                   \
      sizeof(AbsorbShared<TOKENS, NOPE, PARTS>);                                                                        \
  extern "C" __global__ void __launch_bounds__(AbsorbShape<TOKENS, NOPE, PARTS>::THREADS, 2)                            \
      few_tokens_absorb_queries_##NOPE##_##TOKENS##_in_##PARTS(const __grid_constant__ AbsorbArguments given) {         \
    absorb<TOKENS, NOPE, PARTS>(given);                                                                                 \
  }
#define EXPAND(TOKENS)                                                                                       \
  extern "C" __device__ int few_tokens_expand_values_##TOKENS##_shared_bytes = sizeof(ExpandShared<TOKENS>); \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                   \
      few_tokens_expand_values_##TOKENS(const __grid_constant__ ExpandArguments given) {                     \
    expand<TOKENS>(given);                                                                                   \
  }
#define FEW_TOKENS(TOKENS) \
  EXPAND(TOKENS)           \
  ABSORB(TOKENS, 128, 2)   \
  ABSORB(TOKENS, 192, 2)
FEW_TOKENS(16)
FEW_TOKENS(32)
FEW_TOKENS(64)
FEW_TOKENS(96)
EXPAND(128)
ABSORB(128, 128, 2)
ABSORB(16, 128, 8)
ABSORB(16, 192, 8)
ABSORB(32, 128, 8)
ABSORB(32, 192, 8)
