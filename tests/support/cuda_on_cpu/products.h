// Warpgroup products: all 128 threads issue one, and it is done at any time between then and their wait for it.
//
// Modelled: operands in shared memory by descriptor (K-major with 64 or 128-byte swizzle, MN-major with 128), or in registers;
// sums written late. Sums are exact to fp32: the tensor cores' shorter sums of FP8 products are not modelled.

#pragma once

#include "copies.h"
#include "numbers.h"

namespace cuda {

struct e4m3 {
  u8 code;
  float value() const { return of_e4m3(code); }
};
struct bf16 {
  u16 code;
  float value() const { return of_bf16(code); }
};

// Where byte `byte` of an operand's row lies, or of its column if the operand is stored transposed.
inline u32 operand_at(u64 descriptor, u32 row, u32 byte, bool transposed) {
  u32 start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  u32 mode = descriptor >> 62, pitch = mode == 1 ? 128 : 64;
  if (transposed) {
    u32 k = byte / 2;
    return swizzled(start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2, 128);
  }
  return swizzled(start + row / 8 * stride + row % 8 * pitch + byte, pitch);
}

template <class T, int ROWS>
inline void load_operand(float (&to)[ROWS][32], u64 descriptor, bool transposed, const u8* shared) {
  for (int row = 0; row < ROWS; row++)
    for (u32 byte = 0; byte < 32; byte += sizeof(T))
      to[row][byte / sizeof(T)] = reinterpret_cast<const T*>(shared + operand_at(descriptor, row, byte, transposed))->value();
}

// Most of a launch's time, while other code is mostly compiled for one launch.
template <int N, class T, bool IN_REGISTERS>
__attribute__((optimize("O2"))) inline void multiply(Product& product, const u8* shared) {
  constexpr int K = 32 / sizeof(T);
  static float a[64][32], b[N][32], columns[K][N];
  if (IN_REGISTERS) {
    for (int thread = 0; thread < 128; thread++)
      for (int byte = 0; byte < 16; byte += sizeof(T)) {
        int row = thread / 32 * 16 + thread % 32 / 4 + byte / 4 % 2 * 8, at = thread % 4 * 4 + byte / 8 * 16 + byte % 4;
        a[row][at / sizeof(T)] = reinterpret_cast<const T*>((const u8*)product.words[thread] + byte)->value();
      }
  } else {
    load_operand<T>(a, product.a, product.a_transposed, shared);
  }
  load_operand<T>(b, product.b, product.b_transposed, shared);
  for (int k = 0; k < K; k++)
    for (int n = 0; n < N; n++) columns[k][n] = b[n][k];
  for (int row = 0; row < 64; row++) {
    float sums[N] = {};
    for (int k = 0; k < K; k++)
      for (int n = 0; n < N; n++) sums[n] += a[row][k] * columns[k][n];
    for (int n = 0; n < N; n++) {
      float& sum = product.sums[row / 16 * 32 + row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
      sum = product.accumulate ? sum + sums[n] : sums[n];
    }
  }
}

inline Warpgroup& own_warpgroup() { return own_block().warpgroups[own().number / 128]; }

inline void do_products(Warpgroup& group, u64 until) {
  for (; group.done < until; group.done++) {
    group.products.front().multiply(group.products.front(), own_block().shared);
    group.products.pop_front();
  }
}

// One thread's part of a product. Its registers of the first operand are read now.
inline void issue(Product given, float* const* sums, const u32* words) {
  Warpgroup& group = own_warpgroup();
  Thread& thread = own();
  u64 at = thread.products++ - group.done;
  if (at == group.products.size()) group.products.push_back(given);
  Product& product = group.products[at];
  if (product.multiply != given.multiply || product.b != given.b || product.a != given.a) fail("a warpgroup's threads issue different products");
  product.sums[thread.number % 128] = sums[0];
  if (words) memcpy(product.words[thread.number % 128], words, sizeof product.words[0]);
  if (++product.issued < 128) return;
  group.issued++;
  launched.progress++;
  if (drawn() % 2) do_products(group, group.issued);
}

// Waits for all but the latest `pending` committed groups.
inline void wait_for_products(u32 pending) {
  Thread& thread = own();
  Warpgroup& group = own_warpgroup();
  if (thread.groups.size() <= pending) return;
  u64 until = thread.groups[thread.groups.size() - 1 - pending];
  while (group.issued < until) wait_while(&group.issued, ~0ull, group.issued);
  if (drawn() % 4 == 0) yield();
  do_products(group, until);
}

}  // namespace cuda
