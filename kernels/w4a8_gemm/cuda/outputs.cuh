// A warp's sums on their way out: 16 outputs of a tile's rows as bf16, or eight gated ones as e4m3.
//
// A thread's sums are total[j * 4 + h * 2 + i] of row j * 8 + lane % 4 * 2 + i and output h * 8 + lane / 4. Gate and up are
// interleaved by eights of outputs, so that a thread has both of one gated output: h is 0 for the gate, 1 for up.

#pragma once

#include "../../cuda/hopper.cuh"

__device__ __forceinline__ void store_global(void* to, u32 low, u32 high) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, u32 values) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(values) : "memory");
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Outputs of ROWS rows; `scales` are those of this thread's two rows, then of the two that follow eight rows on. `staged` is the
// warp's own. `out` is the place of its first row. Each step is made for all rows before the next: 16 rows after 16 rows would
// wait for shared memory and for registers each time.
template <int ROWS>
struct Outputs {
  // The last eight of these rows may lie past the end, and are zeros then.
  static constexpr int EIGHTS = ROWS / 8, SIXTEENS = (ROWS + 15) / 16;
  uint4* staged;
  float2 scales[SIXTEENS * 2];

  __device__ __forceinline__ Outputs(uint4* staged, const float2* from) : staged(staged) {
#pragma unroll
    for (int j = 0; j < SIXTEENS * 2; j++) scales[j] = j < EIGHTS ? from[j * 4] : float2{};
  }

  // bf16, `width` outputs a row. Two lanes store a row's 32 bytes.
  __device__ __forceinline__ void store(const float* total, unsigned short* out, long long width, int rows) const {
    int lane = threadIdx.x % 32;
    uint4 found[SIXTEENS];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SIXTEENS; i++) stage(i, total);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SIXTEENS; i++) found[i] = staged[i * 32 + lane];
    out += lane / 2 * width + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < SIXTEENS; i++, out += 16 * width)
      if (i * 16 + lane / 2 < min(rows, ROWS)) store_global(out, found[i]);
  }

  // e4m3, `width` gated outputs a row, each multiplied by the thread's factor. A lane stores eight bytes of each of two rows.
  __device__ __forceinline__ void store_gated(const float* total, float factor, u8* out, long long width, int rows) const {
    int lane = threadIdx.x % 32, row = lane / 8 * 16 + lane % 8;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SIXTEENS; i++) stage_gated(i, total, factor);
    __syncwarp();
    uint4 found = staged[lane];
    out += row * width;
    if (row < min(rows, ROWS)) store_global(out, __byte_perm(found.x, found.y, 0x6420), __byte_perm(found.z, found.w, 0x6420));
    if (row + 8 < min(rows, ROWS))
      store_global(out + 8 * width, __byte_perm(found.x, found.y, 0x7531), __byte_perm(found.z, found.w, 0x7531));
  }

 private:
  // One of a thread's four sums of the j-th eight rows.
  __device__ __forceinline__ static float sum(const float* total, int j, int at) { return j < EIGHTS ? total[j * 4 + at] : 0.0f; }

  // The i-th 16 rows, transposed: a row's 16 outputs next to each other.
  __device__ __forceinline__ void stage(int i, const float* total) const {
    int lane = threadIdx.x % 32;
    u32 packed[4];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int j = i * 2 + k;
      packed[k * 2] = pack_bf16(sum(total, j, 0) * scales[j].x, sum(total, j, 1) * scales[j].y);
      packed[k * 2 + 1] = pack_bf16(sum(total, j, 2) * scales[j].x, sum(total, j, 3) * scales[j].y);
    }
    // Lanes l / 8 point to the rows of matrices: rows 0 to 7 or 8 to 15, outputs 0 to 7 or 8 to 15.
    u32 address = shared_address(staged + i * 32) + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
    store_transposed(address, packed[0], packed[1], packed[2], packed[3]);
  }

  // As `stage`, for gated outputs. A 16-bit element of the matrix holds one output of two rows that are eight apart.
  __device__ __forceinline__ void stage_gated(int i, const float* total, float factor) const {
    float even[2], odd[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int j = i * 2 + k;
      even[k] = gated(sum(total, j, 0), sum(total, j, 2), scales[j].x) * factor;
      odd[k] = gated(sum(total, j, 1), sum(total, j, 3), scales[j].y) * factor;
    }
    u32 packed = pack_e4m3(even[0], even[1]) | pack_e4m3(odd[0], odd[1]) << 16;
    store_transposed(shared_address(staged + i * 8 + threadIdx.x % 8), packed);
  }

  __device__ __forceinline__ static float gated(float gate, float up, float scale) { return silu(gate * scale) * (up * scale); }
};
