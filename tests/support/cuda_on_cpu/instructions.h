// PTX instructions by name, dots and colons as underscores: the inline assembly of a source is translated to calls of these.
// An instruction that is not here does not compile. Cache hints, fences, prefetches and register counts do nothing.

#pragma once

#include "copies.h"
#include "numbers.h"
#include "products.h"

namespace ptx {

using namespace cuda;

// Operands in braces.
template <class T, int N>
struct Vector {
  T* at[N];
  T& operator[](int i) const { return *at[i]; }
};
template <class T, class... Rest>
inline Vector<T, 1 + sizeof...(Rest)> vector(T& first, Rest&... rest) {
  return {{&first, (T*)&rest...}};
}

// An address of shared memory may have a CTA's rank and one above its 24 bits; or else it is in the own CTA.
inline Block& block_of(u32 address) { return address >> 24 ? launched.cluster.blocks[(address >> 24) - 1] : own_block(); }
inline u32 offset_of(u32 address) { return address & 0xFFFFFF; }
inline u8* shared_at(u32 address, u32 bytes) {
  Block& block = block_of(address);
  if (offset_of(address) % bytes || offset_of(address) + bytes > block.shared_bytes) fail("a misplaced access of shared memory");
  return block.shared + offset_of(address);
}
inline Barrier& barrier_of(u32 address) { return barrier_at(block_of(address).shared, offset_of(address)); }
inline void mapa_shared_cluster_u32(u32& there, u32 address, u32 rank) { there = address | (rank + 1) << 24; }
inline u32 cluster_ctarank() { return own_block().rank; }
inline u32 cluster_nctarank() { return launched.cluster.blocks.size(); }
struct ThreadNumber {
  u32 x() const { return own().number; }
};
inline ThreadNumber tid;

// Moves and numbers.
template <class T> inline void mov_u32(T& to, u32 from) { to = from; }
inline void mov_f32(float& to, float from) { to = from; }
inline void mov_b32(u32& to, Vector<u16, 2> from) { to = from[0] | from[1] << 16; }
inline void mov_b32(Vector<u16, 2> to, u32 from) { to[0] = from, to[1] = from >> 16; }
inline void setp_ne_b32(bool& to, u32 first, u32 second) { to = first != second; }
template <class T> inline void selp_u32(T& to, u32 yes, u32 no, bool which) { to = which ? yes : no; }
inline void cvt_rn_bf16x2_f32(u32& to, float high, float low) { to = to_bf16(low) | to_bf16(high) << 16; }
inline void cvt_rn_satfinite_e4m3x2_f32(u16& to, float high, float low) { to = to_e4m3(low) | to_e4m3(high) << 8; }
inline void cvt_rn_f16_f32(u16& to, float from) { to = to_f16(from); }
inline void cvt_rn_f16x2_e4m3x2(u32& to, u16 from) { to = to_f16(of_e4m3(from)) | to_f16(of_e4m3(from >> 8)) << 16; }
inline void ex2_approx_ftz_f32(float& to, float from) { to = exp2f(from); }
inline void abs_bf16x2(u32& to, u32 from) { to = from & 0x7FFF7FFF; }
inline void max_bf16x2(u32& to, u32 x, u32 y) {
  to = to_bf16(fmaxf(of_bf16(x), of_bf16(y))) | to_bf16(fmaxf(of_bf16(x >> 16), of_bf16(y >> 16))) << 16;
}
inline void mul_rn_bf16x2(u32& to, u32 x, u32 y) {
  to = to_bf16(of_bf16(x) * of_bf16(y)) | to_bf16(of_bf16(x >> 16) * of_bf16(y >> 16)) << 16;
}

// Plain loads and stores.
template <class T> inline void ld_global_s32(T& to, u64 from) { to = *(const int*)from; }
inline void ld_acquire_gpu_global_s32(int& to, u64 from) {
  yield();
  to = *(const int*)from;
}
inline void red_release_gpu_global_add_s32(u64 to, int added) {
  *(int*)to += added;
  launched.progress++;
}
template <class V> inline void load_words(V to, const u8* from, int words) {
  for (int i = 0; i < words; i++) memcpy(&to[i], from + 4 * i, 4);
}
template <class V> inline void ld_global_v4_u32(V to, u64 from) { load_words(to, (const u8*)from, 4); }
template <class V> inline void ld_global_L1_no_allocate_v4_u32(V to, u64 from) { load_words(to, (const u8*)from, 4); }
template <class V> inline void ld_global_cg_v4_u32(V to, u64 from) { load_words(to, (const u8*)from, 4); }
inline void ld_global_f32(float& to, u64 from) { to = *(const float*)from; }
inline void ld_global_cg_s64(long long& to, u64 from) { to = *(const long long*)from; }
template <class V> inline void ld_global_v4_f32(V to, u64 from) { load_words(to, (const u8*)from, 4); }
template <class V> inline void ld_shared_v4_u32(V to, u32 from) { load_words(to, shared_at(from, 16), 4); }
template <class V> inline void ld_shared_v2_u32(V to, u32 from) { load_words(to, shared_at(from, 8), 2); }
template <class V> inline void ld_shared_cluster_v2_s32(V to, u32 from) { load_words(to, shared_at(from, 8), 2); }
template <class V> inline void store_words(u64 to, V from, int words) {
  for (int i = 0; i < words; i++) memcpy((u8*)to + 4 * i, &from[i], 4);
}
template <class V> inline void st_global_v4_u32(u64 to, V from) { store_words(to, from, 4); }
template <class V> inline void st_global_v2_u32(u64 to, V from) { store_words(to, from, 2); }

// Eight lanes each give the rows' addresses of an 8 x 8 matrix of 16-bit values.
template <bool TRANSPOSED, class V, class Access>
inline void each_value(V words, u32 address, int matrices, Access access) {
  auto& addresses = exchange(address);
  u32 lane = own_lane();
  for (int matrix = 0; matrix < matrices; matrix++)
    for (u32 half = 0; half < 2; half++) {
      u32 across = lane % 4 * 2 + half, row = TRANSPOSED ? across : lane / 4, column = TRANSPOSED ? lane / 4 : across;
      access((u16*)&words[matrix] + half, (u16*)shared_at(addresses[matrix * 8 + row][0], 16) + column);
    }
  exchange(0);
}
inline void take(u16* own, u16* shared) { *own = *shared; }
inline void give(u16* own, u16* shared) { *shared = *own; }
template <class V> inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(V to, u32 from) { each_value<false>(to, from, 4, take); }
template <class V> inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(V to, u32 from) { each_value<true>(to, from, 4, take); }
template <class V> inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 to, V from) { each_value<false>(from, to, 4, give); }
template <class V> inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 to, V from) { each_value<true>(from, to, 4, give); }
template <class V> inline void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(u32 to, V from) { each_value<true>(from, to, 2, give); }
template <class V> inline void stmatrix_sync_aligned_m8n8_x1_trans_shared_b16(u32 to, V from) { each_value<true>(from, to, 1, give); }

// Barriers.
inline void bar_sync(u32 number, u32 threads) { meet(own_block().named[number], threads); }
inline void barrier_cluster_arrive_relaxed_aligned() { arrive_at_cluster(); }
inline void barrier_cluster_arrive_release_aligned() { barrier_cluster_arrive_relaxed_aligned(); }
inline void barrier_cluster_wait_aligned() { wait_while(&launched.cluster.meeting.generation, ~0ull, own().cluster_generation); }
inline void barrier_cluster_wait_acquire_aligned() { barrier_cluster_wait_aligned(); }
inline void mbarrier_init_shared_cta_b64(u32 at, u32 count) {
  *(Barrier*)shared_at(at, 8) = {.phase = 0, .count = count, .pending = count, .bytes = 0};
}
inline void mbarrier_arrive_shared_cta_b64(u32 at) { arrive(barrier_of(at)); }
inline void mbarrier_arrive_shared_cluster_b64(u32 at) { arrive(barrier_of(at)); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(u32 at, u32 bytes) {
  Barrier& barrier = barrier_of(at);
  barrier.bytes += bytes;
  arrive(barrier);
}
inline void mbarrier_test_wait_parity_shared_cta_b64(bool& done, u32 at, u32 parity) {
  if (drawn() % 4 == 0) yield();
  done = barrier_of(at).phase != parity;
}
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, u32 at, u32 parity) {
  if (drawn() % 4 == 0) yield();
  wait_while((const u64*)&barrier_of(at), PHASE, parity);
  done = barrier_of(at).phase != parity;
}

// Copies.
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, int column, int row, u32 barrier) {
  copy_box(block_of(to).shared, offset_of(to), *(const Boxes*)map, column, row, barrier_of(barrier));
}
inline void cp_async_bulk_tensor_5d_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, u64 map, int column, int row, int half, int eight, int matrix, u32 barrier) {
  if (row || half) fail("a box of halves that does not begin with both");
  copy_halves(block_of(to).shared, offset_of(to), *(const Boxes*)map, column, eight, matrix, barrier_of(barrier));
}
inline void createpolicy_fractional_L2_evict_first_b64(u64&, float) {}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    u32 to, u64 map, int column, int row, u32 barrier, u64) {
  cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(to, map, column, row, barrier);
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    u32 to, u64 map, int column, int row, u32 barrier, u32 mask) {
  for (Block& block : launched.cluster.blocks)
    if (mask >> block.rank & 1) copy_box(block.shared, to, *(const Boxes*)map, column, row, barrier_at(block.shared, barrier));
}
inline void cp_async_bulk_tensor_2d_global_shared_cta_bulk_group(u64 map, int column, int row, u32 from) {
  store_box(*(const Boxes*)map, column, row, own_block().shared, from);
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read(u32) {}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 from, u32 bytes, u32 barrier) {
  if (to % 16 || from % 16 || bytes % 16) fail("a bulk copy that is not aligned");
  start({block_of(to).shared, offset_of(to), bytes, 0, 0, (const u8*)from, &barrier_of(barrier), nullptr, 0, {}});
}
// Memory that is not there ends the process.
inline void cp_async_bulk_prefetch_L2_global(u64 from, u32 bytes) {
  if (from % 16 || bytes % 16 || !bytes) fail("a prefetch that is not aligned");
  (void)*(volatile const u8*)from, (void)*(volatile const u8*)(from + bytes - 1);
}
template <class... T>
inline void send(u32 to, u32 barrier, T... values) {
  // On an H200 such a launch ended with an illegal instruction.
  if (launched.cluster.blocks.size() == 1) fail("a store through shared memory in a launch without a cluster");
  Transfer transfer{block_of(to).shared, offset_of(to), 4 * sizeof...(T), 0, 0, nullptr, &barrier_of(barrier), nullptr, 0, {}};
  int at = 0;
  (memcpy(transfer.own + 4 * at++, &values, 4), ...);
  start(transfer);
}
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(u32 to, u32 value, u32 barrier) { send(to, barrier, value); }
template <class V>
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_f32(u32 to, V values, u32 barrier) {
  send(to, barrier, values[0], values[1], values[2], values[3]);
}
inline void cp_async_cg_shared_global(u32 to, u64 from, u32 bytes, u32 copied) { copy_piece(to, from, bytes, copied); }
inline void cp_async_cg_shared_global(u32 to, u64 from, u32 bytes) { copy_piece(to, from, bytes, bytes); }
inline void cp_async_ca_shared_global(u32 to, u64 from, u32 bytes, u32 copied) { copy_piece(to, from, bytes, copied); }
inline void cp_async_ca_shared_global(u32 to, u64 from, u32 bytes) { copy_piece(to, from, bytes, bytes); }
inline void cp_async_commit_group() { own().piece_groups.push_back(own().pieces.size()); }
inline void cp_async_wait_group(u32 pending) {
  auto& groups = own().piece_groups;
  if (groups.size() > pending) wait_for_pieces(groups[groups.size() - 1 - pending]);
}
inline void cp_async_wait_all() { wait_for_pieces(own().pieces.size()); }
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(u32 at) {
  late_arrivals.push_back({&own(), own().pieces.size(), &barrier_of(at)});
}

// Products. The last numbers are the operands' signs, and whether they are stored transposed.
template <int N, class T>
inline void wgmma(Vector<float, N / 2> sums, u64 a, u64 b, bool accumulate, int, int, bool a_transposed = false, bool b_transposed = false) {
  issue({.multiply = multiply<N, T, false>, .a = a, .b = b, .accumulate = accumulate, .a_transposed = a_transposed,
         .b_transposed = b_transposed}, sums.at, nullptr);
}
template <int N, class T>
inline void wgmma(Vector<float, N / 2> sums, Vector<const u32, 4> a, u64 b, bool accumulate, int, int, bool b_transposed = false) {
  u32 words[4] = {a[0], a[1], a[2], a[3]};
  issue({.multiply = multiply<N, T, true>, .a = 0, .b = b, .accumulate = accumulate, .a_transposed = false,
         .b_transposed = b_transposed}, sums.at, words);
}
// A warp's product. A lane has rows lane / 4 and 8 more of the first operand, and column lane / 4 of the second.
template <float VALUE(u16), class A, class B>
inline void multiply_of_warp(Vector<float, 4> sums, A a, B b) {
  auto half = [](u64 words, int at) { return VALUE(words >> at * 16); };
  auto& given = exchange(a[0] | (u64)a[2] << 32, a[1] | (u64)a[3] << 32, b[0] | (u64)b[1] << 32);
  for (int i = 0; i < 4; i++) {
    int row = own_lane() / 4 + i / 2 * 8, column = own_lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++)
      sums[i] += half(given[row % 8 * 4 + k % 4][row / 8], k / 4) * half(given[column * 4 + k % 4][2], k / 4);
  }
}
template <class A, class B>
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(Vector<float, 4> sums, A a, B b, Vector<float, 4>) {
  multiply_of_warp<of_f16>(sums, a, b);
}
template <class A, class B>
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(Vector<float, 4> sums, A a, B b, Vector<float, 4>) {
  multiply_of_warp<of_bf16>(sums, a, b);
}
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { own().groups.push_back(own().products); }
inline void wgmma_wait_group_sync_aligned(u32 pending) { wait_for_products(pending); }

// What has no effect here.
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
inline void fence_proxy_async_global() {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}
inline void prefetch_tensormap(u64) {}
inline void discard_global_L2(u64, int) {}

}  // namespace ptx
