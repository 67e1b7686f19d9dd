// Which tiles a block of threads takes, and how it gets their elements.
//
// Of a matrix a block takes one tile, whose eight rows a thread loads at once.
//
// Of a computation blocks stay, and take tile after tile. Each thread copies the inputs of its rows
// to shared memory before it needs them: while it encodes and stores a tile, the first rows of its
// next are on their way. It reads back what it has copied itself, and no other thread does, so that
// no barrier is needed for them.
#pragma once

#include "../copies.cuh"
#include "source.cuh"

namespace fp8core {

// The inputs of a thread's rows, which are copied ahead.
template <typename Source, bool kFromEnd>
class RowsAhead {
  using Stage = typename Source::Stage;
  using Origin = typename Source::Origin;
  static constexpr int kRows = Source::kRows, kStages = Source::kStages, kBatches = 8 / kRows;
  static_assert(kStages > 1 && kStages <= kBatches);

 public:
  __device__ RowsAhead(const CastParams<Source>& p, TilePlace place)
      : p_(p), stages_(memory()), origin_(origin_of(blockIdx.x, place)) {
#pragma unroll
    for (int batch = 0; batch < kStages; ++batch) copy(stages_[batch], batch);
  }

  // The tile that a block takes at its turn; turns of a block are a grid apart.
  __device__ unsigned tile_of(unsigned turn) const { return kFromEnd ? p_.tiles - 1 - turn : turn; }
  // Calls take(row, part, elements) for each of the thread's eight rows of the turn's tile.
  template <typename Take>
  __device__ void take_rows(unsigned turn, TilePlace place, const Source& source,
                            const Take& take) {
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      wait_for_copies<kStages - 1>();
      // In each tile a batch takes the same stage, where the number of stages divides that of
      // batches.
      Stage& stage = stages_[kBatches % kStages == 0 ? batch % kStages : stage_];
      typename Source::Row rows[kRows];
      source.read(rows, stage, batch * kRows);
      if (batch + kStages == kBatches) origin_ = origin_of(turn + gridDim.x, place);
      copy(stage, (batch + kStages) % kBatches);
      if (++stage_ == kStages) stage_ = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Eight<typename Source::Value> x[Source::kParts];
        source.values(rows[i], x);
#pragma unroll
        for (int part = 0; part < Source::kParts; ++part) take(batch * kRows + i, part, x[part]);
      }
    }
  }

 private:
  static __device__ Stage* memory() {
    extern __shared__ uint4 stages_ahead[];
    return reinterpret_cast<Stage*>(stages_ahead);
  }
  __device__ Origin origin_of(unsigned turn, TilePlace place) const {
    if (turn >= p_.tiles) return Origin();  // of no rows
    const TileSpan at = span_of_plain_tile(p_.tile, tile_of(turn));
    return Origin(p_.inputs, p_.tile, at, place.ty, place.tx);
  }
  __device__ void copy(Stage& to, int batch) {
    Source::copy(to, origin_, p_.inputs, p_.tile, batch * kRows);
    end_copies();
  }

  const CastParams<Source>& p_;
  Stage* const stages_;
  int stage_ = 0;
  Origin origin_;  // of the row that is copied next, but for the number of rows left
};

// Dynamic shared memory of a kernel that walks over tiles.
template <typename Source>
constexpr std::size_t walk_bytes = Source::kStages * sizeof(typename Source::Stage);
template <typename T>
inline constexpr std::size_t walk_bytes<MatrixSource<T>> = 0;
template <typename T>
inline constexpr std::size_t walk_bytes<SummedMatrixSource<T>> = 0;

// Calls work(tile, its span, thread, take_rows) for each tile of the block. `thread` is this
// thread's number, whose rows and columns of a tile are place_of(thread); take_rows(take) calls
// take(row, part, elements) for each of its eight rows. All threads have left a tile's work before
// the next begins. `kFromEnd`: the last tile comes first.
template <bool kFromEnd = false, typename Source, typename PlaceOf, typename Work>
__device__ void for_tiles(const CastParams<Source>& p, const PlaceOf& place_of, const Work& work) {
  if constexpr (is_matrix<Source>) {
    const TileSpan at = span_of_tile(p.tile, kFromEnd ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    work(blockIdx.x, at, threadIdx.x, [&](const auto& take) {
      const TilePlace place = place_of(threadIdx.x);
      Eight<typename Source::Value> x[8];
      Source(p.inputs, p.tile, at, place.ty, place.tx).load(x, 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) take(i, 0, x[i]);
    });
  } else {
    RowsAhead<Source, kFromEnd> ahead(p, place_of(threadIdx.x));
    for (unsigned turn = blockIdx.x; turn < p.tiles; turn += gridDim.x) {
      if (turn != blockIdx.x) __syncthreads();
      // Unknown to the compiler: it would hold what follows from it in registers from tile to tile.
      unsigned thread = threadIdx.x;
      asm volatile("" : "+r"(thread));
      const TilePlace place = place_of(thread);
      const unsigned tile = ahead.tile_of(turn);
      const TileSpan at = span_of_plain_tile(p.tile, tile);
      const Source source(p.inputs, p.tile, at, place.ty, place.tx);
      work(tile, at, thread, [&](const auto& take) { ahead.take_rows(turn, place, source, take); });
    }
    wait_for_copies<0>();
  }
}

}  // namespace fp8core
