// The kernels of casts with float32 scales, and of the amaxes that casts by rows and by groups
// read. tile_parts.cuh has the steps that they share.
#pragma once

#include "tile_walk.cuh"

namespace fp8core {

// Writes the scales of all groups, also of empty ones, which have no tile. The first tile calls it.
template <Granularity G>
__device__ void store_group_scales(const TileParams& p) {
  const Groups& groups = p.args.groups;
  for (int64_t group = threadIdx.x; group < groups.count; group += kTileThreads) {
    const float scale = G == Granularity::kDelayed ? p.args.scale[group * groups.scale_stride]
                                                   : scale_of(p.args.workspace[group], p.rule);
    p.args.rowwise.scale_inv[group] = __frcp_rn(scale);
  }
}

// One scale for the whole tile: a tensor's, or a 128 x 128 block's.
template <typename T, Granularity G>
__device__ float tile_scale(const Eight<T> (&x)[8], const TileParams& p, const TileSpan& at,
                            float* shared) {
  const bool is_grouped = p.args.groups.offsets != nullptr;
  const bool is_first = at.row == 0 && at.column == 0 && threadIdx.x == 0 && !is_grouped;
  if (G != Granularity::kBlock128 && is_grouped) {
    if (at.tile_row == 0 && at.tile_column == 0) store_group_scales<G>(p);
    if (at.is_tail) return 1.0f;
  }
  float tile_amax = 0.0f;
  if (G != Granularity::kTensor && (G != Granularity::kDelayed || p.args.amax_out != nullptr)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) tile_amax = fmaxf(tile_amax, x[i].amax());
    tile_amax = block_max<kTileThreads>(tile_amax, shared);
  }
  if constexpr (G == Granularity::kDelayed) {
    if (p.args.amax_out != nullptr && threadIdx.x == 0)
      atomic_amax(p.args.amax_out + at.group * p.args.groups.amax_stride, tile_amax);
    const float scale = p.args.scale[at.group * p.args.groups.scale_stride];
    if (is_first) *p.args.rowwise.scale_inv = __frcp_rn(scale);
    return scale;
  } else if constexpr (G == Granularity::kTensor) {
    if (is_grouped) return scale_of(p.args.workspace[at.group], p.rule);
    const float amax = reduce_partials<kTileThreads>(p.args.workspace, p.args.num_partials, shared);
    const float scale = scale_of(amax, p.rule);
    if (is_first) *p.args.rowwise.scale_inv = __frcp_rn(scale);
    return scale;
  } else {
    const float scale = at.is_tail ? 1.0f : scale_of(tile_amax, p.rule);
    if (threadIdx.x == 0 && at.tile_row < p.scale_tiles) {
      const float inverse = __frcp_rn(scale);
      const QuantizeOutput &row = p.args.rowwise, &column = p.args.columnwise;
      if (row.codes != nullptr) row.scale_inv[at.tile_row * row.pitch + at.tile_column] = inverse;
      if (column.codes != nullptr)
        column.scale_inv[at.tile_column * column.pitch + at.tile_row] = inverse;
    }
    return scale;
  }
}

// Current scaling reads x twice. The second pass begins at the end of x, which is still cached.
template <Granularity G>
__device__ unsigned tile_of_block() {
  return G == Granularity::kTensor ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

// A matrix, whose tile a thread loads at once and holds.
template <typename Source, typename Encoding, Granularity G>
__device__ void cast_matrix_tile(const CastParams<Source>& params) {
  using T = typename Source::Value;
  __shared__ alignas(16) uint2 parked[kTile * 16];
  __shared__ alignas(16) float parked_sums[Source::kSums ? kTileThreads / 32 : 1][kTile];
  __shared__ float shared[kTileThreads / 32];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const TileParams& p = params.tile;
  const TileSpan at = span_of_tile(p, tile_of_block<G>());
  Eight<T> x[8];
  Source(params.inputs, p, at, ty, tx).load(x, 0);
  count_tile(x, p);
  if constexpr (Source::kSums) {
    float sums[8];
    add_rows<Source>(x, sums);
    park_sums(sums, parked_sums, ty, tx);
  }
  const float scale = tile_scale<T, G>(x, p, at, shared);
  const Encoding encoding(p);
  uint2 codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = encoding.row(x[i], scale);
  if (p.args.rowwise.codes != nullptr) {
    const RowCodes row_codes(p, at, ty, tx);
#pragma unroll
    for (int i = 0; i < 8; ++i) row_codes.store(i, codes[i]);
  }
  const bool has_columns = p.args.columnwise.codes != nullptr;
  if (!has_columns && !Source::kSums) return;
  if (has_columns) park_columns(codes, parked, ty, tx);
  __syncthreads();
  if constexpr (Source::kSums) store_sums(p, at, params.inputs.tile_sums, parked_sums);
  if (has_columns) store_columns(p, at, parked, threadIdx.x);
}

// The scale of a whole tensor that is not in groups, for all tiles of a block.
template <Granularity G>
__device__ float tensor_scale(const TileParams& p, const CastSlots& slots, float* shared) {
  float scale;
  if constexpr (G == Granularity::kDelayed)
    scale = *slots.scale;
  else
    scale = scale_of(reduce_partials<kTileThreads>(slots.workspace, p.args.num_partials, shared),
                     p.rule);
  if (blockIdx.x == 0 && threadIdx.x == 0) *slots.scale_inv = __frcp_rn(scale);
  return scale;
}

// Calls take(amax, slots) by one thread, with the largest of what the threads have of each tensor:
// of all parts, or of each one that is a tensor of its own. `shared` is free.
template <int kParts, typename Take>
__device__ void for_amaxes(const TileParams& p, const float (&of_parts)[kParts], float* shared,
                           const Take& take) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part > 0 && !p.is_split) return;
    float largest = of_parts[part];
    if (!p.is_split) {
#pragma unroll
      for (int other = 1; other < kParts; ++other) largest = fmaxf(largest, of_parts[other]);
    }
    if (part > 0) __syncthreads();  // all threads have read those of the part before
    largest = block_max<kTileThreads>(largest, shared);
    if (threadIdx.x == 0) take(largest, slots_of(p, part));
  }
}

// The results of a computation, which is not in groups. A thread encodes a row as soon as it has
// computed it, and holds codes alone.
template <typename Source, typename Encoding, Granularity G>
__device__ void cast_computed_tiles(const CastParams<Source>& params) {
  constexpr int kParts = Source::kParts;
  constexpr bool kFromEnd = G == Granularity::kTensor || Source::kReadBefore;
  __shared__ alignas(16) uint2 parked[kTile * 16];
  __shared__ alignas(16) float parked_sums[Source::kSums ? kTileThreads / 32 : 1][kTile];
  __shared__ float shared[kTileThreads / 32];
  const TileParams& p = params.tile;
  const Encoding encoding(p);
  float scale[kParts];
  bool is_recorded = false, is_counted = false;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const CastSlots slots = slots_of(p, part);
    is_recorded = is_recorded || (G == Granularity::kDelayed && slots.amax_out != nullptr);
    is_counted = is_counted || slots.nonfinite != nullptr;
    if (part > 0 && p.is_split) __syncthreads();  // `shared` is free
    scale[part] = part == 0 || p.is_split ? tensor_scale<G>(p, slots, shared) : scale[0];
  }
  float amax[kParts] = {};
  const auto cast_tile = [&](unsigned tile, const TileSpan& at, unsigned thread,
                             const auto& take_rows) {
    const auto [ty, tx] = place_of_thread(thread);
    Seen<typename Source::Value> seen[kParts];
    uint2 codes[kParts][8];
    [[maybe_unused]] float sums[kParts][8] = {};
    take_rows([&](int i, int part, const auto& x) {
      seen[part].take(x);
      codes[part][i] = encoding.row(x, scale[part]);
      if constexpr (Source::kSums) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[part][j] = __fadd_rn(sums[part][j], x[j]);
      }
    });
    if (is_recorded || is_counted) record_elements<Source>(seen, p, params.inputs, tile, amax);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const TileSpan here = part_of(at, p, part);
      if (part > 0) __syncthreads();  // the shared memory of the part before is free
      if (p.args.rowwise.codes != nullptr) {
        const RowCodes row_codes(p, here, ty, tx);
#pragma unroll
        for (int i = 0; i < 8; ++i) row_codes.store(i, codes[part][i]);
      }
      const bool has_columns = p.args.columnwise.codes != nullptr;
      if (!has_columns && !Source::kSums) continue;
      if (has_columns) park_columns(codes[part], parked, ty, tx);
      if constexpr (Source::kSums) park_sums(sums[part], parked_sums, ty, tx);
      __syncthreads();
      if constexpr (Source::kSums) store_sums(p, here, params.inputs.tile_sums, parked_sums);
      if (has_columns) store_columns(p, here, parked, thread);
    }
  };
  for_tiles<kFromEnd>(params, place_of_thread, cast_tile);
  if (!is_recorded) return;
  __syncthreads();  // all threads have read the scale's amaxes in `shared`
  for_amaxes(p, amax, shared, [](float largest, const CastSlots& slots) {
    if (slots.amax_out != nullptr) atomic_amax(slots.amax_out, largest);
  });
}

template <typename Source, typename Encoding, Granularity G>
__global__ void __launch_bounds__(kTileThreads, Source::kBlocks)
    uniform_tile(const __grid_constant__ CastParams<Source> p) {
  if constexpr (is_matrix<Source>)
    cast_matrix_tile<Source, Encoding, G>(p);
  else
    cast_computed_tiles<Source, Encoding, G>(p);
}

// Writes the columnwise scales of empty groups, which have no tile. The first row of tiles calls
// it.
__device__ inline void store_empty_groups(const TileParams& p, int64_t column) {
  const Groups& groups = p.args.groups;
  const Matrix& m = p.args.x;
  int before = 0;
  for (int64_t group = 0; group < groups.count; ++group) {
    const int end = clamp_offset(groups.offsets[group + 1], static_cast<int>(m.rows));
    if (end <= before) {  // its amaxes are 0, or those of a part of the group that is elsewhere
      const float amax = p.args.workspace[m.rows + group * m.cols + column];
      p.args.columnwise.scale_inv[group * p.args.columnwise.pitch + column] =
          __frcp_rn(scale_of(amax, p.rule));
    }
    before = max(before, end);
  }
}

// A row's scale in this tile and, if this is its first tile, in memory: that of row 8 ty + tx / 2.
template <typename T, Granularity G>
__device__ float row_scale(const Eight<T> (&x)[8], const TileParams& p, const TileSpan& at, int ty,
                           int tx) {
  const QuantizeOutput& out = p.args.rowwise;
  const int64_t row = at.row + ty * 8 + tx / 2;
  float amax;
  if constexpr (G == Granularity::kVec128)
    amax = row_amax(x, tx);
  else
    amax = row < at.load_end ? p.args.workspace[row] : 0.0f;
  const float scale = at.is_tail ? 1.0f : scale_of(amax, p.rule);
  if (tx % 2 == 0 && row < at.row_end) {
    if (G == Granularity::kVec128)
      out.scale_inv[at.tile_column * out.pitch + row] = __frcp_rn(scale);
    else if (at.tile_column == 0)
      out.scale_inv[row] = __frcp_rn(scale);
  }
  return scale;
}

// The scales of the tile's columns, to shared memory and, if this is their first tile, to memory.
// A barrier follows.
template <typename T, Granularity G>
__device__ void column_scales(const Eight<T> (&x)[8], const TileParams& p, const TileSpan& at,
                              float (*maxima)[kTile], float* scales, int tx) {
  float amax = 0.0f;
  const int64_t column = at.column + threadIdx.x;  // the column of one of the first 128 threads
  if constexpr (G == Granularity::kVec128)
    amax = column_amax(x, maxima, tx);
  else if (threadIdx.x < kTile && column < at.column_end && !at.is_tail)
    amax = p.args.workspace[p.args.x.rows + at.group * p.args.x.cols + column];
  if (threadIdx.x >= kTile) return;
  const QuantizeOutput& out = p.args.columnwise;
  const float scale = at.is_tail ? 1.0f : scale_of(amax, p.rule);
  scales[threadIdx.x] = scale;
  if (column >= at.column_end) return;
  if (G == Granularity::kVec128) {
    if (at.tile_row < p.scale_tiles)
      out.scale_inv[at.tile_row * out.pitch + column] = __frcp_rn(scale);
  } else {
    if (at.is_first && !at.is_tail) out.scale_inv[at.group * out.pitch + column] = __frcp_rn(scale);
    if (at.tile_row == 0 && p.args.groups.offsets != nullptr) store_empty_groups(p, column);
  }
}

// Casts with a scale for each row of an operand (kRow: for the whole row, from the amaxes in the
// workspace; kVec128: for the row's 128 elements in the tile). A row of the columnwise operand is a
// column of x, so the two orientations have different codes.
template <typename Source, typename Encoding, Granularity G>
__global__ void __launch_bounds__(kTileThreads, Source::kDirectedBlocks)
    directed_tile(const __grid_constant__ CastParams<Source> params) {
  using T = typename Source::Value;
  __shared__ alignas(16) uint2 parked[kTile * 16];
  __shared__ alignas(16) float maxima[kTileThreads / 32][kTile];
  __shared__ float scales[kTile];
  __shared__ typename Held<Source>::Waiting waiting;
  const TileParams& p = params.tile;
  const Encoding encoding(p);
  const auto cast_tile = [&](unsigned, const TileSpan& at, unsigned thread, const auto& take_rows) {
    const auto [ty, tx] = place_of_thread(thread);
    Held<Source> held(take_rows, waiting);
    Eight<T>(&x)[8] = held.x;
#pragma unroll
    for (int part = 0; part < Source::kParts; ++part) {
      const TileSpan here = part_of(at, p, part);
      if (part > 0) held.next();
      count_tile(x, p, part);
      if (part > 0) __syncthreads();  // the shared memory of the part before is free
      if (params.inputs.tile_sums != nullptr) {
        float sums[8];
        add_rows<Source>(x, sums);
        park_sums(sums, maxima, ty, tx);
        __syncthreads();
        store_sums(p, here, params.inputs.tile_sums, maxima);
        __syncthreads();
      }
      if (p.args.rowwise.codes != nullptr) {
        const float scale = row_scale<T, G>(x, p, here, ty, tx);
        const RowCodes row_codes(p, here, ty, tx);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float scale_of_row = __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16);
          row_codes.store(i, encoding.row(unpacked<Source>(x[i]), scale_of_row));
        }
      }
      if (p.args.columnwise.codes == nullptr) continue;
      column_scales<T, G>(x, p, here, maxima, scales, tx);
      __syncthreads();
      float scale[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) scale[j] = scales[tx * 8 + j];
      uint2 codes[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = encoding.row(unpacked<Source>(x[i]), scale);
      park_columns(codes, parked, ty, tx);
      __syncthreads();
      store_columns(p, here, parked, thread);
    }
  };
  // The end of what was read before is still cached.
  for_tiles<G == Granularity::kRow || Source::kReadBefore>(params, place_of_thread, cast_tile);
}

// Amaxes of whole rows, and of columns over all rows or over those of each group. The workspace
// [rows + cols], or [rows + groups * cols], is zero before.
template <typename Source>
__global__ void __launch_bounds__(kTileThreads, Source::kDirectedBlocks)
    directed_amax(const __grid_constant__ CastParams<Source> params) {
  using T = typename Source::Value;
  __shared__ alignas(16) float maxima[kTileThreads / 32][kTile];
  const TileParams& p = params.tile;
  const Matrix& m = p.args.x;
  const auto take_maxima = [&](unsigned, const TileSpan& at, unsigned thread,
                               const auto& take_rows) {
    const auto [ty, tx] = place_of_thread(thread);
    float of_rows[Source::kParts][8];
    ColumnMaxima<T> columns[Source::kParts];
    take_rows([&](int i, int part, const Eight<T>& x) {
      of_rows[part][i] = x.amax();
      columns[part].take(x);
    });
#pragma unroll
    for (int part = 0; part < Source::kParts; ++part) {
      const TileSpan here = part_of(at, p, part);
      const int64_t row = at.row + ty * 8 + tx / 2;
      const float largest = row_amax(of_rows[part], tx);
      if (tx % 2 == 0 && row < at.load_end) atomic_amax(p.args.workspace + row, largest);
      if (part > 0) __syncthreads();  // the maxima of the part before have been read
      float of_columns[8];
      columns[part].read(of_columns);
      const float amax = column_amax(of_columns, maxima, tx);
      const int64_t column = here.column + threadIdx.x;
      if (threadIdx.x < kTile && column < here.column_end && !at.is_tail)
        atomic_amax(p.args.workspace + m.rows + at.group * m.cols + column, amax);
    }
  };
  for_tiles(params, place_of_thread, take_maxima);
}

// Amaxes of shares of a tensor that is computed, one of each block of threads, as amax_partials
// writes them.
template <typename Source>
__global__ void __launch_bounds__(kTileThreads, 3)
    tile_partials(const __grid_constant__ CastParams<Source> params) {
  __shared__ float shared[kTileThreads / 32];
  float largest[Source::kParts] = {};
  const auto take_largest = [&](unsigned, const TileSpan&, unsigned, const auto& take_rows) {
    take_rows(
        [&](int, int part, const auto& x) { largest[part] = fmaxf(largest[part], x.amax()); });
  };
  for_tiles(params, place_of_thread, take_largest);
  for_amaxes(params.tile, largest, shared,
             [](float amax, const CastSlots& slots) { slots.workspace[blockIdx.x] = amax; });
}

// Amaxes of whole groups. The workspace [groups] is zero before.
template <typename T>
__global__ void __launch_bounds__(kTileThreads) group_amax(const __grid_constant__ TileParams p) {
  __shared__ float shared[kTileThreads / 32];
  const TileSpan at = span_of_tile(p, blockIdx.x);
  if (at.is_tail) return;
  Eight<T> x[8];
  MatrixSource<T>({}, p, at, threadIdx.x / 16, threadIdx.x % 16).load(x, 0);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, x[i].amax());
  largest = block_max<kTileThreads>(largest, shared);
  if (threadIdx.x == 0) atomic_amax(p.args.workspace + at.group, largest);
}

}  // namespace fp8core
