// Barriers in shared memory, and copies that land there some time after they were started, in any order.
//
// Modelled: phases, arrivals and expected bytes; boxes with their swizzle and zeros outside a tensor; copies of a thread, of a
// bulk, and to other CTAs of the cluster. Not modelled: cache hints, and that a proxy fence is missing.

#pragma once

#include <algorithm>

#include "threads.h"

namespace cuda {

// The eight bytes of an mbarrier. Shared memory starts as ones, so that one without a count has not been initialized.
struct Barrier {
  u64 phase : 1, count : 20, pending : 20;
  long long bytes : 23;
};
static_assert(sizeof(Barrier) == 8);
constexpr u64 PHASE = 1;

inline Barrier& barrier_at(u8* shared, u32 address) {
  if (address % 8 || address + 8 > own_block().shared_bytes) fail("a barrier outside of shared memory");
  Barrier& barrier = *reinterpret_cast<Barrier*>(shared + address);
  if (barrier.count == 0xFFFFF) fail("a barrier is not initialized");
  return barrier;
}
inline void end_phase_if_complete(Barrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  launched.progress++;
}
inline void arrive(Barrier& barrier) {
  if (!barrier.pending) fail("more arrivals than a barrier counts");
  barrier.pending--;
  end_phase_if_complete(barrier);
}

inline u32 swizzled(u32 address, u32 row_bytes) {
  u32 rows = row_bytes == 128 ? 7 : row_bytes == 64 ? 3 : 0;
  return address ^ (address >> 7 & rows) << 4;
}

// Bytes on their way. A tensor's row is swizzled.
struct Transfer {
  u8* shared;
  u32 to, bytes, zeros, swizzle;
  const u8* from;
  Barrier* barrier;
  // A piece of this thread, and its number.
  Thread* thread;
  u64 piece;
  // What is copied if `from` is null.
  u8 own[16];
};
inline std::vector<Transfer> transfers;

// Threads that arrive at a barrier once their pieces have landed.
struct LateArrival {
  Thread* thread;
  u64 pieces;
  Barrier* barrier;
};
inline std::vector<LateArrival> late_arrivals;

inline void start(Transfer transfer) {
  if (transfer.to + transfer.bytes > own_block().shared_bytes) fail("a copy outside of shared memory");
  transfers.push_back(transfer);
}

inline void land(Transfer& transfer) {
  const u8* from = transfer.from ? transfer.from : transfer.own;
  u32 copied = transfer.bytes - transfer.zeros;
  if (transfer.swizzle)
    for (u32 at = 0; at < transfer.bytes; at += 16) {
      u8* to = transfer.shared + swizzled(transfer.to + at, transfer.swizzle);
      at < copied ? memcpy(to, from + at, 16) : memset(to, 0, 16);
    }
  else {
    memcpy(transfer.shared + transfer.to, from, copied);
    memset(transfer.shared + transfer.to + copied, 0, transfer.zeros);
  }
  launched.progress++;
  if (Thread* thread = transfer.thread) {
    thread->pieces[transfer.piece] = true;
    while (thread->pieces_landed < thread->pieces.size() && thread->pieces[thread->pieces_landed]) thread->pieces_landed++;
  }
  if (!transfer.barrier) return;
  transfer.barrier->bytes -= transfer.bytes;
  end_phase_if_complete(*transfer.barrier);
}

// Some of the copies that are under way land, or all, or at most one.
enum class Landing { SOME, ONE, ALL };
inline void land(Landing which) {
  size_t most = transfers.size(), landing = which == Landing::ALL ? most : which == Landing::ONE ? most > 0 : drawn() % (most + 1);
  for (; landing; landing--) {
    std::swap(transfers[drawn() % transfers.size()], transfers.back());
    Transfer transfer = transfers.back();
    transfers.pop_back();
    land(transfer);
  }
  std::erase_if(late_arrivals, [](const LateArrival& late) {
    if (late.thread->pieces_landed < late.pieces) return false;
    arrive(*late.barrier);
    return true;
  });
}

// Fields of a tensor map as the adapter for tests writes them: see launches.py.
struct Boxes {
  u64 address, rows, row_bytes, box_rows, box_bytes;
};

// Copies `width` bytes of a row from `column` on, as far as the row has them, and zeros if there is no such row.
inline void copy_row(u8* shared, u32 to, const Boxes& boxes, int column, u64 row, bool there, u32 width, Barrier& barrier) {
  bool inside = there && column < (int)boxes.row_bytes;
  const u8* from = (const u8*)boxes.address + (inside ? row * boxes.row_bytes + column : 0);
  u32 zeros = inside ? (u32)std::max<long long>(0, (long long)column + width - (long long)boxes.row_bytes) : width;
  start({shared, to, width, zeros, width, from, &barrier, nullptr, 0, {}});
}

inline void copy_box(u8* shared, u32 to, const Boxes& boxes, int column, int row, Barrier& barrier) {
  u32 width = boxes.box_bytes;
  if (to % (width == 128 ? 1024 : 512)) fail("a box that is not aligned to its swizzle");
  for (u32 i = 0; i < boxes.box_rows; i++)
    copy_row(shared, to + i * width, boxes, column, row + i, row + (int)i >= 0 && row + i < boxes.rows, width, barrier);
}

// Copies a box of a map of halves: eight times, eight rows of the first half of a matrix and the same ones of the second half.
// The map's `rows` are those of a half, and its `box_rows` the number of matrices.
inline void copy_halves(u8* shared, u32 to, const Boxes& boxes, int column, int eight, int matrix, Barrier& barrier) {
  if (to % 1024) fail("a box that is not aligned to its swizzle");
  for (u32 i = 0; i < 128; i++) {
    u64 row = (eight + i / 16) * 8 + i % 8;
    bool there = row < boxes.rows && matrix < (int)boxes.box_rows;
    copy_row(shared, to + i * 128, boxes, column, (2 * matrix + i / 8 % 2) * boxes.rows + row, there, 128, barrier);
  }
}

// Copies a box to memory, at once.
inline void store_box(const Boxes& boxes, int column, int row, const u8* shared, u32 from) {
  if (from % 1024 && boxes.box_bytes == 128) fail("a box that is not aligned to its swizzle");
  for (u32 i = 0; i < boxes.box_rows; i++)
    for (u32 at = 0; at < boxes.box_bytes; at += 16)
      if (row + i < boxes.rows && column + at < boxes.row_bytes)
        memcpy((u8*)boxes.address + (row + i) * boxes.row_bytes + column + at, shared + swizzled(from + i * boxes.box_bytes + at, boxes.box_bytes), 16);
}

// A thread's own copy of up to 16 bytes.
inline void copy_piece(u32 to, u64 from, u32 bytes, u32 copied) {
  if (to % bytes || (copied && from % bytes)) fail("a piece that is not aligned");
  start({own_block().shared, to, bytes, bytes - copied, 0, (const u8*)from, nullptr, &own(), own().pieces.size(), {}});
  own().pieces.push_back(false);
}
// Waits for this many of the thread's first pieces.
inline void wait_for_pieces(u64 pieces) {
  while (own().pieces_landed < pieces) wait_while(&own().pieces_landed, ~0ull, own().pieces_landed);
}

}  // namespace cuda
