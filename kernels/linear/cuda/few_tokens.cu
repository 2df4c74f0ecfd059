// A linear layer with few outputs and few tokens, such as a gate, for Hopper (sm_90a): bf16 products, summed in float32. Its time is
// that of bringing the activations to the multiprocessors, and of starting and ending.
//
// A CTA multiplies some tokens by 64 outputs over 1,024 inputs. The tensor cores' 64 rows hold outputs, N holds tokens. All of
// its weights are copied to shared memory while the previous kernel still runs (programmatic dependent launch). Two warpgroups
// share the inputs. The CTA stores a share of the sums, and the kernel that reads the results adds the shares up: with 14 shares
// of 512 inputs a whole gate of 96 tokens took 5.7 us, with 7 it takes 5.2.
//
// A CTA fills a multiprocessor. With room for two of half the size, the next call's weights arrived together with this call's
// activations and delayed them (6.5 us for 5.7). Copying activations to all CTAs of a cluster at once gained nothing.

#include "../../cuda/bf16_products.cuh"

constexpr int OUTPUTS = 64, INPUTS = 1024;
constexpr int GROUPS = 2, GROUP_THREADS = 128, THREADS = GROUPS * GROUP_THREADS;
// A box is 128 bytes (64 elements) of as many rows as there are outputs or tokens, swizzled.
constexpr int ELEMENTS = 64, LINE = 128, BOXES = INPUTS / ELEMENTS, BOXES_OF_GROUP = BOXES / GROUPS;
constexpr int WEIGHT_BYTES = OUTPUTS * LINE;
// Floats of a token's row of sums: 4 more than a power of two, so that a warp's stores go to different banks.
constexpr int ROW = OUTPUTS + 4;

struct Arguments {
  TensorMap weight, hidden;
  float* out;
  int tokens, outputs;
};

template <int TOKENS>
struct Shared {
  u8 weight[GROUPS][BOXES_OF_GROUP][WEIGHT_BYTES];
  u8 hidden[GROUPS][BOXES_OF_GROUP][TOKENS * LINE];
  u64 full[GROUPS][BOXES_OF_GROUP];
};

template <int TOKENS>
struct Product {
  Shared<TOKENS>& shared;
  const Arguments& given;
  // This CTA's first output, its share and its first token; the warpgroup's number.
  int output, share, token, group;

  // The first byte of a box in its rows.
  __device__ __forceinline__ int column(int of_group, int i) const {
    return share * INPUTS * 2 + (of_group * BOXES_OF_GROUP + i) * LINE;
  }

  __device__ __forceinline__ void copy_weight() const {
    for (int i = 0; i < BOXES; i++) init_barrier(&shared.full[0][i], 1);
    fence_async_proxy();
    for (int i = 0; i < BOXES_OF_GROUP; i++)
      for (int of_group = 0; of_group < GROUPS; of_group++) {
        u64* full = &shared.full[of_group][i];
        arrive_and_expect(full, WEIGHT_BYTES + TOKENS * LINE);
        copy_box(shared.weight[of_group][i], given.weight, column(of_group, i), output, full);
      }
    prefetch_map(given.hidden);
  }

  __device__ __forceinline__ void copy_hidden() const {
    for (int i = 0; i < BOXES_OF_GROUP; i++)
      for (int of_group = 0; of_group < GROUPS; of_group++)
        copy_box(shared.hidden[of_group][i], given.hidden, column(of_group, i), token, &shared.full[of_group][i]);
  }

  // Multiplies over this warpgroup's inputs.
  __device__ __forceinline__ void multiply(float (&sum)[TOKENS / 2]) const {
    u32 weight = shared_address(shared.weight[group]), hidden = shared_address(shared.hidden[group]);
#pragma unroll
    for (int i = 0; i < BOXES_OF_GROUP; i++) {
      wait(&shared.full[group][i], 0);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < ELEMENTS / 16; step++)
        multiply_step(sum, descriptor<1>(weight + i * WEIGHT_BYTES + step * 32),
                      descriptor<1>(hidden + i * (TOKENS * LINE) + step * 32), i + step > 0);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(sum);
  }

  // A warpgroup's sums lie where its weights were.
  __device__ __forceinline__ float* sums(int of_group) const {
    static_assert(TOKENS * ROW * 4 <= BOXES_OF_GROUP * WEIGHT_BYTES, "they fit there");
    return reinterpret_cast<float*>(shared.weight[of_group]);
  }

  __device__ __forceinline__ void leave(const float (&sum)[TOKENS / 2]) const {
    int lane = threadIdx.x % 32;
    float* own = sums(group) + lane % 4 * 2 * ROW + threadIdx.x % GROUP_THREADS / 32 * 16 + lane / 4;
    // Wait until all of the warpgroup have read its weights.
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#pragma unroll
    for (int at = 0; at < TOKENS / 2; at++) own[(at / 4 * 8 + at % 2) * ROW + at / 2 % 2 * 8] = sum[at];
    __syncthreads();
  }

  // Stores whole lines, each the sum over the warpgroups.
  __device__ __forceinline__ void store() const {
    constexpr int QUADS = OUTPUTS / 4;
    float* out = given.out + ((long long)share * given.tokens + token) * given.outputs + output;
#pragma unroll
    for (int at = threadIdx.x; at < TOKENS * QUADS; at += THREADS) {
      int row = at / QUADS, column = at % QUADS * 4;
      float4 total = *reinterpret_cast<const float4*>(sums(0) + row * ROW + column);
      float4 other = *reinterpret_cast<const float4*>(sums(1) + row * ROW + column);
      total = make_float4(total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w);
      if (token + row < given.tokens) *reinterpret_cast<float4*>(out + (long long)row * given.outputs + column) = total;
    }
  }
};

template <int TOKENS>
__device__ __forceinline__ void multiply_few(const Arguments& given) {
  extern __shared__ __align__(1024) u8 memory[];
  start_next();
  int group = __shfl_sync(~0u, (int)threadIdx.x / GROUP_THREADS, 0);
  Product<TOKENS> work{*reinterpret_cast<Shared<TOKENS>*>(memory), given, (int)blockIdx.x * OUTPUTS, (int)blockIdx.y,
                      (int)blockIdx.z * TOKENS, group};
  if (threadIdx.x == 0) work.copy_weight();
  __syncthreads();
  wait_for_earlier();
  if (threadIdx.x == 0) work.copy_hidden();
  __syncwarp();
  float sum[TOKENS / 2];
  work.multiply(sum);
  work.leave(sum);
  work.store();
}

#define FEW_TOKENS(TOKENS)                                                               \
  extern "C" __device__ int few_tokens_##TOKENS##_shared_bytes = sizeof(Shared<TOKENS>); \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                               \
      few_tokens_##TOKENS(const __grid_constant__ Arguments given) {                     \
    multiply_few<TOKENS>(given);                                                         \
  }
FEW_TOKENS(16)
FEW_TOKENS(32)
FEW_TOKENS(48)
