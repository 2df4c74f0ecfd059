// Which part of the work, and which heads, a CTA of decode attention has.

#pragma once

#include "../../cuda/cluster.cuh"
#include "parts.cuh"

// What a CTA computes: the pieces of a part for 64 heads of one query.
struct Place {
  Part part;
  int query_index, first_head;
  u32 rank;
};

template <int CTAS>
__device__ __forceinline__ Place own_place(const Work& work) {
  u32 rank = CTAS > 1 ? cluster_rank() : 0;
  int tiles = (work.heads + HEADS - 1) / HEADS, clusters = tiles * work.query_tokens / CTAS, cluster = blockIdx.x / CTAS;
  int tile = cluster % clusters * CTAS + rank;
  return {work.part(cluster / clusters), tile / tiles, tile % tiles * HEADS, rank};
}
