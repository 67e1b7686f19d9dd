// The kernels of casts with float32 scales, and of the amaxes that casts by rows and by groups
// read. tile_parts.cuh has the steps that they share.
#pragma once

#include "tile_parts.cuh"

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
template <typename T, Format F, Granularity G>
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

template <typename T, Format F, Granularity G>
__device__ void cast_uniform_tile(const TileParams& p, unsigned tile) {
  __shared__ alignas(16) uint2 parked[kTile * 16];
  __shared__ float shared[kTileThreads / 32];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const TileSpan at = span_of_tile(p, tile);
  Eight<T> x[8];
  load_tile(x, p, at, ty, tx);
  count_tile(x, p);
  const float scale = tile_scale<T, F, G>(x, p, at, shared);
  uint2 codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = encode_row<F>(x[i], scale);
  if (p.args.rowwise.codes != nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i) store_row(p, at, ty * 8 + i, tx, codes[i]);
  }
  if (p.args.columnwise.codes == nullptr) return;
  park_columns(codes, parked, ty, tx);
  __syncthreads();
  store_columns(p, at, parked);
}

// Four blocks a multiprocessor, 64 registers a thread: 1 to 5 % faster than three; with five,
// registers spill, and a cast takes a third longer.
constexpr int kUniformBlocks = 4;

template <typename T, Format F, Granularity G>
__global__ void __launch_bounds__(kTileThreads, kUniformBlocks)
    uniform_tile(const __grid_constant__ TileParams p) {
  cast_uniform_tile<T, F, G>(p, tile_of_block<G>());
}

// Two tensors: the tiles of the first, then those of the other.
template <typename T, Format F, Granularity G>
__global__ void __launch_bounds__(kTileThreads, kUniformBlocks)
    uniform_tile_pair(const __grid_constant__ TileParams p,
                      const __grid_constant__ TileParams other, unsigned tiles) {
  const unsigned tile = tile_of_block<G>();
  const bool is_first = tile < tiles;
  cast_uniform_tile<T, F, G>(is_first ? p : other, is_first ? tile : tile - tiles);
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

// Casts with a scale for each row of an operand (kRow: for the whole row, from the amaxes in the
// workspace; kVec128: for the row's 128 elements in the tile). A row of the columnwise operand is a
// column of x, so the two orientations have different codes.
template <typename T, Format F, Granularity G>
__global__ void __launch_bounds__(kTileThreads) directed_tile(const TileParams p) {
  __shared__ alignas(16) uint2 parked[kTile * 16];
  __shared__ alignas(16) float maxima[kTileThreads / 32][kTile];
  __shared__ float scales[kTile];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const Matrix& m = p.args.x;
  const TileSpan at = span_of_tile(p, blockIdx.x);
  Eight<T> x[8];
  load_tile(x, p, at, ty, tx);
  count_tile(x, p);
  if (p.args.rowwise.codes != nullptr) {
    const QuantizeOutput& out = p.args.rowwise;
    const int64_t held = at.row + ty * 8 + tx / 2;  // the row whose scale this thread computes
    float amax;
    if constexpr (G == Granularity::kVec128)
      amax = row_amax(x, tx);
    else
      amax = held < at.load_end ? p.args.workspace[held] : 0.0f;
    const float scale = at.is_tail ? 1.0f : scale_of(amax, p.rule);
    if (tx % 2 == 0 && held < at.row_end) {
      if (G == Granularity::kVec128)
        out.scale_inv[at.tile_column * out.pitch + held] = __frcp_rn(scale);
      else if (at.tile_column == 0)
        out.scale_inv[held] = __frcp_rn(scale);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float row_scale = __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16);
      store_row(p, at, ty * 8 + i, tx, encode_row<F>(x[i], row_scale));
    }
  }
  if (p.args.columnwise.codes == nullptr) return;
  float amax = 0.0f;
  const int64_t column = at.column + threadIdx.x;  // the column of one of the first 128 threads
  if constexpr (G == Granularity::kVec128)
    amax = column_amax(x, maxima, tx);
  else if (threadIdx.x < kTile && column < m.cols && !at.is_tail)
    amax = p.args.workspace[m.rows + at.group * m.cols + column];
  if (threadIdx.x < kTile) {
    const QuantizeOutput& out = p.args.columnwise;
    const float scale = at.is_tail ? 1.0f : scale_of(amax, p.rule);
    scales[threadIdx.x] = scale;
    if (column < m.cols) {
      if (G == Granularity::kVec128) {
        if (at.tile_row < p.scale_tiles)
          out.scale_inv[at.tile_row * out.pitch + column] = __frcp_rn(scale);
      } else {
        if (at.is_first && !at.is_tail)
          out.scale_inv[at.group * out.pitch + column] = __frcp_rn(scale);
        if (at.tile_row == 0 && p.args.groups.offsets != nullptr) store_empty_groups(p, column);
      }
    }
  }
  __syncthreads();
  float scale[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scale[j] = scales[tx * 8 + j];
  uint2 codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = encode_row<F>(x[i], scale);
  park_columns(codes, parked, ty, tx);
  __syncthreads();
  store_columns(p, at, parked);
}

// Amaxes of whole rows, and of columns over all rows or over those of each group. The workspace
// [rows + cols], or [rows + groups * cols], is zero before.
template <typename T>
__global__ void __launch_bounds__(kTileThreads) directed_amax(const TileParams p) {
  __shared__ alignas(16) float maxima[kTileThreads / 32][kTile];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const Matrix& m = p.args.x;
  const TileSpan at = span_of_tile(p, blockIdx.x);
  Eight<T> x[8];
  load_tile(x, p, at, ty, tx);
  const int64_t held = at.row + ty * 8 + tx / 2;
  const float row = row_amax(x, tx);
  if (tx % 2 == 0 && held < at.load_end) atomic_amax(p.args.workspace + held, row);
  const float amax = column_amax(x, maxima, tx);
  const int64_t column = at.column + threadIdx.x;
  if (threadIdx.x < kTile && column < m.cols && !at.is_tail)
    atomic_amax(p.args.workspace + m.rows + at.group * m.cols + column, amax);
}

// Amaxes of whole groups. The workspace [groups] is zero before.
template <typename T>
__global__ void __launch_bounds__(kTileThreads) group_amax(const TileParams p) {
  __shared__ float shared[kTileThreads / 32];
  const TileSpan at = span_of_tile(p, blockIdx.x);
  if (at.is_tail) return;
  Eight<T> x[8];
  load_tile(x, p, at, threadIdx.x / 16, threadIdx.x % 16);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, x[i].amax());
  largest = block_max<kTileThreads>(largest, shared);
  if (threadIdx.x == 0) atomic_amax(p.args.workspace + at.group, largest);
}

}  // namespace fp8core
