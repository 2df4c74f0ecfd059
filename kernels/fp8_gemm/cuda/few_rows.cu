// Block-scaled products of FP8 weights with few rows of activations, for Hopper (sm_90a). The time is that of reading the
// weight, outputs * inputs bytes, and with 32 rows 2 to 3 us more to start and to end. "A for B us" means A instead of B.
//
// Work. A tile is up to 192 outputs for all rows. The tensor cores' 64 rows hold the outputs of a warpgroup, N holds rows of
// activations. The CTAs of a cluster share a tile's inputs in units of 128, taking alternate units: the bytes that two CTAs
// read of a row are then contiguous, which memory delivers faster than two streams far apart (16384 to 7168 with 96 rows: 33.3
// for 34.0 us). At the end each CTA adds up a share of the tile, which the others send to its shared memory, in order of rank.
// Writing to another CTA's shared memory runs at 13 to 20 bytes a cycle, so tiles are narrow and their CTAs few: sums of 256
// outputs over four CTAs took 2.6 us for 96 rows, of 128 outputs over two CTAs 1.0.
//
// A CTA fills a multiprocessor. One thread of a warpgroup of its own copies units of the weight, of the activations and of
// their scales into a ring. No kernel of a step writes weights, so the first units of the weight are copied while the previous
// kernel still runs (programmatic dependent launch); only activations wait for it. The other warpgroups multiply. 128 outputs
// of a unit arrive every 0.43 us, and with 96 rows warpgroups of 64 outputs took 0.52 us for them if each one multiplied,
// scaled and waited in turn. So two warpgroups (four for tiles of 64 outputs) take turns unit by unit: one scales in float32
// while others multiply. Tiles of 192 outputs leave no registers for turns; they serve weights of more tiles than the chip runs
// at once. The cache evicts such weights first (1536 to 24576 with 96 rows: 12.8 for 13.8 us). If a cluster shares a row's
// bytes, evicting first made 16384 to 7168 between its neighbours 1 us slower with 32 rows.
//
// Tiles of 112 outputs are for weights that take long: 16384 to 7168 then uses 128 of 132 multiprocessors instead of 112 (30.4
// for 32.0 us with 32 rows), though the tensor cores' last 16 rows hold nothing.
//
// Activations are not multicast: waiting until a neighbour has room costs more than the copies that it saves (16384 to 7168
// with 32 rows 36.4 for 33.3 us, with 96 rows 40.8 for 39.6; with a ring of their own 35.7 for 35.4). `notes.md` has what was
// tried.

#include "few_rows_copies.cuh"
#include "few_rows_products.cuh"
#include "few_rows_sums.cuh"

template <int ROWS, int OUTPUTS>
__device__ __forceinline__ void run(const Arguments& given) {
  using Of = Shape<ROWS, OUTPUTS>;
  extern __shared__ __align__(1024) u8 memory[];
  static_assert(sizeof(Shared<ROWS, OUTPUTS>) <= SHARED_BYTES);
  start_next();
  int rank = cluster_rank(), ranks = cluster_size(), count = (given.units - rank + ranks - 1) / ranks;
  Share<ROWS, OUTPUTS> own{count, (int)blockIdx.x / ranks, rank, ranks, __shfl_sync(~0u, (int)threadIdx.x / GROUP_THREADS, 0)};
  Shared<ROWS, OUTPUTS>& shared = *reinterpret_cast<Shared<ROWS, OUTPUTS>*>(memory);
  Copier<ROWS, OUTPUTS> copier{shared, given, own};
  copier.prepare();
  if (threadIdx.x >= Of::CONSUMERS) {
    give_registers<Of::FEW_REGISTERS>();
    if (threadIdx.x == Of::CONSUMERS) copier.produce();
  } else {
    take_registers<Of::REGISTERS>();
    float total[ROWS / 2] = {};
    // Activations arrive after the previous kernel's end anyway. The wait tells all storing threads that it has ended.
    wait_for_earlier();
    Multiplier<ROWS, OUTPUTS>{shared, own}.multiply_units(total);
    Adder<ROWS, OUTPUTS>{shared, given, own}.add_and_store(total);
  }
}

#define FEW_ROWS(ROWS, OUTPUTS)                                                        \
  extern "C" __device__ int few_rows_##ROWS##_##OUTPUTS##_shared_bytes = SHARED_BYTES; \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)                         \
      few_rows_##ROWS##_##OUTPUTS(const __grid_constant__ Arguments given) {           \
    run<ROWS, OUTPUTS>(given);                                                         \
  }
#define FEW_ROWS_OF(OUTPUTS) FEW_ROWS(16, OUTPUTS) FEW_ROWS(32, OUTPUTS) FEW_ROWS(64, OUTPUTS) FEW_ROWS(96, OUTPUTS)
FEW_ROWS_OF(64)
FEW_ROWS_OF(112)
FEW_ROWS_OF(128)
FEW_ROWS_OF(192)
