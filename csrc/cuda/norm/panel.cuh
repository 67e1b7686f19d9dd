// Norms with casts, in one pass over x: a cluster of blocks takes a panel of kRows rows, and each
// block of it a slice of their columns, which it copies to shared memory and reads from there.
//
//     1. each warp adds up chunks of the slice (statistics.cuh) and stores the sums in all blocks
//        of the cluster; for LayerNorm twice, as the squares are those of deviations from the mean
//     2. each block adds up the chunks of whole rows, and so has their statistics
//     3. it normalizes and casts its slice, 8 x 8 elements a thread, 2048 / kRows * 8 columns a
//     pass
//
// A slice lies in shared memory pass by pass, [rows, columns of a pass] each, 32 KiB. When its
// elements are in registers, a pass's memory takes the codes, transposed, in units of eight bytes
// (8 rows of a column): column 8 tx + j of row group ty lies at [j][ty][tx ^ turn(ty)]. The
// exclusive or spreads the units that a half-warp reads over all banks; those that it writes are
// adjacent anyway.
#pragma once

#include "../cluster.cuh"
#include "../quantize/tile_parts.cuh"
#include "row.cuh"

namespace fp8core {

struct PanelParams {
  TileParams tile;
  Affine affine;
  float *mean, *rstd;
  float inverse_count, eps;
  int slice;    // chunks of a block
  bool rounds;  // y to x's type, before it is cast
};

constexpr int kPanelThreads = 256, kPanelWarps = kPanelThreads / 32;

template <int kRowsOfPanel>
struct PanelShape {
  static constexpr int kRows = kRowsOfPanel;
  static constexpr int kGroups = kRows / 8;                 // of rows that a thread holds
  static constexpr int kThreads = kPanelThreads / kGroups;  // to a row
  static constexpr int kPass = kThreads * 8;                // columns
  static constexpr int kPassElements = kRows * kPass;

  // Bytes of shared memory: elements, then sums of chunks, then statistics.
  __host__ __device__ static constexpr int elements_bytes(int slice) {
    return (slice * kChunk + kPass - 1) / kPass * kPassElements * 2;
  }
  // Floats between the sums of two rows: an odd number of vectors where that fits, so that threads
  // that each read a row meet in no bank.
  __host__ __device__ static constexpr int sums_stride(int chunks) {
    return kRows < kTile ? ((chunks + 3) / 4 | 1) * 4 : (chunks + 3) / 4 * 4;
  }
  // The same memory holds the column maxima of kVec128 afterwards.
  __host__ __device__ static constexpr int sums_bytes(int chunks) {
    const int bytes = kRows * sums_stride(chunks) * 4;
    const int maxima = kRows == kTile ? (kPanelWarps + 1) * kTile * 4 : 0;
    return bytes > maxima ? bytes : maxima;
  }
  __host__ __device__ static constexpr int bytes(int slice, int chunks) {
    return elements_bytes(slice) + sums_bytes(chunks) + kRows * 8;
  }

  // Where an element of the slice lies.
  __device__ static int at(int row, int column) {
    return column / kPass * kPassElements + row * kPass + column % kPass;
  }
  __device__ static int unit_at(int group, int thread, int j) {
    return (j * kGroups + group) * kThreads + (thread ^ (group / 2 * (32 / kGroups)));
  }
};

// A block's slice of a panel.
struct Slice {
  int64_t first_row, rows;  // of the panel; of x
  int first_column, columns;
  int chunks, first_chunk, own_chunks;  // of a row; of the slice

  __device__ Slice(const PanelParams& p, int rows_of_panel) {
    const Matrix& x = p.tile.args.x;
    const int cols = static_cast<int>(x.cols);
    const unsigned blocks = cluster_blocks();
    first_row = static_cast<int64_t>(blockIdx.x / blocks) * rows_of_panel;
    rows = x.rows;
    chunks = (cols + kChunk - 1) / kChunk;
    first_chunk = static_cast<int>(cluster_rank()) * p.slice;
    own_chunks = max(0, min(p.slice, chunks - first_chunk));
    first_column = first_chunk * kChunk;
    columns = max(0, min(own_chunks * kChunk, cols - first_column));
  }
};

template <typename T, typename Shape>
__device__ void copy_slice(T* elements, const PanelParams& p, const Slice& slice) {
  const Matrix& x = p.tile.args.x;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < Shape::kRows; row += kPanelWarps) {
    const T* from =
        static_cast<const T*>(x.data) + (slice.first_row + row) * x.stride + slice.first_column;
    const bool is_row = slice.first_row + row < slice.rows;
    for (int column = lane * 8; column < slice.own_chunks * kChunk; column += kChunk) {
      const bool is_wanted = is_row && column < slice.columns;
      copy_16_bytes(elements + Shape::at(row, column), is_wanted ? from + column : x.data,
                    is_wanted);
    }
  }
}

template <typename T>
__device__ Eight<T> eight_at(const T* shared) {
  Eight<T> x;
  x.bits = *reinterpret_cast<const uint4*>(shared);
  return x;
}

// Stores what share(eight elements, row, how many of them are in the row) gives, summed over each
// chunk, in all blocks. Elements are those that the thread has copied.
template <typename T, typename Shape, typename Share>
__device__ void share_sums(const T* elements, float* sums, const Slice& slice, const Share& share) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % 32, stride = Shape::sums_stride(slice.chunks);
  const unsigned blocks = cluster_blocks();
  for (int chunk = 0; chunk < slice.own_chunks; ++chunk) {
    const int column = chunk * kChunk + lane * 8, inside = column < slice.columns ? 8 : 0;
    for (int first = threadIdx.x / 32; first < Shape::kRows; first += kAtOnce * kPanelWarps) {
      float of_chunk[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kPanelWarps;
        of_chunk[i] = share(eight_at(elements + Shape::at(row, column)), row, inside);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        of_chunk[i] = chunk_sum(of_chunk[i]);
        const int row = first + i * kPanelWarps;
        if (static_cast<unsigned>(lane) < blocks)
          store_in_block(sums + row * stride + slice.first_chunk + chunk, lane, of_chunk[i]);
      }
    }
  }
}

// The statistics of all rows of the panel, to shared and, by one block, to global memory.
template <bool kLayerNorm, typename T, typename Shape>
__device__ void find_statistics(const T* elements, float* sums, RowStatistics* statistics,
                                const PanelParams& p, const Slice& slice) {
  const int stride = Shape::sums_stride(slice.chunks), row = threadIdx.x;
  const auto row_mean = [&] {
    RunningSums running;
    running.add(sums + row * stride, slice.chunks);
    return running.total();
  };
  cluster_wait();  // all blocks run
  if constexpr (kLayerNorm) {
    share_sums<T, Shape>(elements, sums, slice, [](const Eight<T>& x, int, int) {
      return sum_of_eight([&](int j) { return x[j]; });
    });
    cluster_arrive();
    cluster_wait();
    if (row < Shape::kRows) statistics[row].mean = __fmul_rn(row_mean(), p.inverse_count);
    __syncthreads();
    cluster_arrive();  // all blocks have read the sums
    cluster_wait();
  }
  share_sums<T, Shape>(elements, sums, slice, [&](const Eight<T>& x, int of, int inside) {
    return squares_of_eight<kLayerNorm>(x, kLayerNorm ? statistics[of].mean : 0.0f, inside);
  });
  cluster_arrive();
  cluster_wait();
  if (row < Shape::kRows) {
    const float rstd = rstd_of(row_mean(), p.inverse_count, p.eps);
    statistics[row].rstd = rstd;
    if (slice.first_chunk == 0 && slice.first_row + row < slice.rows) {
      p.rstd[slice.first_row + row] = rstd;
      if constexpr (kLayerNorm) p.mean[slice.first_row + row] = statistics[row].mean;
    }
  }
  __syncthreads();
}

// A thread's 8 x 8 elements of a pass, in shared memory.
template <typename T, bool kLayerNorm, typename Shape>
struct PanelUnit {
  const PanelParams& p;
  const T* elements;
  const RowStatistics* statistics;  // of the thread's rows
  int64_t row;
  int rows;  // of the eight, those that are in x; none if the columns are not
  int column;
  float gamma[8], beta[8];

  __device__ PanelUnit(const PanelParams& p, const Slice& slice, const T* of_slice,
                       const RowStatistics* of_panel, int first, int group, int thread)
      : p(p),
        elements(of_slice + Shape::at(group * 8, first + thread * 8)),
        statistics(of_panel + group * 8),
        row(slice.first_row + group * 8),
        rows(0),
        column(slice.first_column + first + thread * 8) {
    if (first + thread * 8 >= slice.columns) return;
    rows = static_cast<int>(max(int64_t{0}, min(int64_t{8}, slice.rows - row)));
    p.affine.read_gamma(gamma, column, 8, true);
    if constexpr (kLayerNorm) p.affine.read_beta(beta, column, 8, true);
  }

  // Row i, rounded to V; zeros where x ends.
  template <typename V>
  __device__ Eight<V> values_as(int i) const {
    Eight<V> y;
    clear(y);
    if (i >= rows) return y;
    const Eight<T> x = eight_at(elements + i * Shape::kPass);
    const RowStatistics of_row = statistics[i];
    float exact[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      exact[j] = normalized<kLayerNorm>(x[j], of_row, gamma[j], kLayerNorm ? beta[j] : 0.0f);
    return rounded<V>(exact);
  }
  // Row i as it is cast.
  __device__ Eight<float> values(int i) const {
    if (!p.rounds) return values_as<float>(i);
    const Eight<T> y = values_as<T>(i);
    const float in_type[8] = {y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7]};
    return rounded<float>(in_type);
  }

  __device__ void store_row(int i, uint2 codes) const {
    if (p.tile.args.rowwise.codes == nullptr || i >= rows) return;
    uint8_t* to = p.tile.args.rowwise.codes + (row + i) * p.tile.args.x.cols + column;
    __stcs(reinterpret_cast<uint2*>(to), codes);
  }
};

// Puts the thread's codes into the memory of its pass, transposed; the threads have read it.
template <typename Shape>
__device__ void park_units(const uint2 (&codes)[8], uint2* units, int group, int thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // columns 0-3, 4-7 of the thread
    uint32_t top[4], bottom[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = half == 0 ? codes[i].x : codes[i].y;
      bottom[i] = half == 0 ? codes[4 + i].x : codes[4 + i].y;
    }
    transpose4(top);
    transpose4(bottom);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      units[Shape::unit_at(group, thread, half * 4 + j)] = make_uint2(top[j], bottom[j]);
  }
}

template <typename Shape>
__device__ void store_units(const uint2* units, const PanelParams& p, const Slice& slice,
                            int first) {
  constexpr int kVectors = Shape::kRows / 16;  // of 16 codes of a column
#pragma unroll
  for (int turn = 0; turn < Shape::kPassElements / 16 / kPanelThreads; ++turn) {
    const int index = turn * kPanelThreads + threadIdx.x;
    const int vector = index % kVectors, thread = index / kVectors % Shape::kThreads,
              j = index / kVectors / Shape::kThreads;
    const uint2 low = units[Shape::unit_at(2 * vector, thread, j)];
    const uint2 high = units[Shape::unit_at(2 * vector + 1, thread, j)];
    const uint4 codes = make_uint4(low.x, low.y, high.x, high.y);
    const int in_slice = first + thread * 8 + j;
    const int64_t row = slice.first_row + vector * 16;
    if (in_slice >= slice.columns || row >= slice.rows) continue;
    uint8_t* to = p.tile.args.columnwise.codes +
                  (slice.first_column + in_slice) * p.tile.args.column_pitch + row;
    if (p.tile.vector_columns && row + 16 <= slice.rows) {
      __stcs(reinterpret_cast<uint4*>(to), codes);
      continue;
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&codes);
    for (int i = 0; i < 16 && row + i < slice.rows; ++i) to[i] = bytes[i];
  }
}

// The amax of a unit's values, NaN left out, and how many are NaN or inf; `largest` is taken of
// all.
template <typename Unit>
__device__ float record_values(const Unit& unit, const Largest<float>& largest,
                               unsigned long long* nonfinite) {
  if (__all_sync(0xFFFFFFFFu, largest.is_finite())) return __uint_as_float(largest.bits);
  float amax = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const Eight<float> y = unit.values(i);
    amax = fmaxf(amax, y.amax());
    count_nonfinite<float, 8>([&](int j) { return y.word(j); }, nonfinite);
  }
  return amax;
}

// One scale, which is given (kDelayed): codes are the same both ways.
template <typename T, bool kLayerNorm, typename Shape>
__device__ void cast_slice(T* elements, const RowStatistics* statistics, const PanelParams& p,
                           const Slice& slice) {
  __shared__ float shared[kPanelWarps];
  const int group = threadIdx.x / Shape::kThreads, thread = threadIdx.x % Shape::kThreads;
  const bool is_recorded = p.tile.args.amax_out != nullptr || p.tile.args.nonfinite != nullptr;
  const EitherEncoder encoding(p.tile);
  const float scale = *p.tile.args.scale;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.tile.args.rowwise.scale_inv = __frcp_rn(scale);
  float amax = 0.0f;
  for (int first = 0; first < slice.columns; first += Shape::kPass) {
    const PanelUnit<T, kLayerNorm, Shape> unit(p, slice, elements, statistics, first, group,
                                               thread);
    Largest<float> largest;
    uint2 codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Eight<float> y = unit.values(i);
#pragma unroll
      for (int j = 0; j < 8; ++j) largest.take(y.word(j));
      codes[i] = encoding.row(y, scale);
      unit.store_row(i, codes[i]);
    }
    if (is_recorded) amax = fmaxf(amax, record_values(unit, largest, p.tile.args.nonfinite));
    if (p.tile.args.columnwise.codes == nullptr) continue;
    auto* units = reinterpret_cast<uint2*>(elements + Shape::at(0, first));
    __syncthreads();
    park_units<Shape>(codes, units, group, thread);
    __syncthreads();
    store_units<Shape>(units, p, slice, first);
  }
  if (p.tile.args.amax_out == nullptr) return;
  amax = block_max<kPanelThreads>(amax, shared);
  if (threadIdx.x == 0) atomic_amax(p.tile.args.amax_out, amax);
}

// A scale for each 128 elements along k (kVec128): those of a row for the rowwise codes, those of a
// column for the others. `maxima` holds [warps + 1, columns of a pass].
template <typename T, bool kLayerNorm, typename Shape>
__device__ void cast_slice_in_blocks(T* elements, const RowStatistics* statistics,
                                     float (*maxima)[kTile], const PanelParams& p,
                                     const Slice& slice) {
  const int group = threadIdx.x / Shape::kThreads, thread = threadIdx.x % Shape::kThreads;
  const QuantizeOutput &rowwise = p.tile.args.rowwise, &columnwise = p.tile.args.columnwise;
  const EitherEncoder encoding(p.tile);
  float* scales = maxima[kPanelWarps];
  for (int first = 0; first < slice.columns; first += Shape::kPass) {
    const PanelUnit<T, kLayerNorm, Shape> unit(p, slice, elements, statistics, first, group,
                                               thread);
    Eight<T> y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = unit.template values_as<T>(i);
    count_nonfinite<T, 32>([&](int i) { return y[i / 4].word(i % 4); }, p.tile.args.nonfinite);
    uint2 codes[8];
    if (rowwise.codes != nullptr) {
      const int64_t tile = (slice.first_column + first) / kTile;
      const int64_t row = slice.first_row + group * 8 + thread / 2;
      const float scale = scale_of(row_amax(y, thread), p.tile.rule);
      if (thread % 2 == 0 && row < slice.rows)
        rowwise.scale_inv[tile * rowwise.pitch + row] = __frcp_rn(scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float row_scale = __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16);
        unit.store_row(i, encoding.row(y[i], row_scale));
      }
    }
    if (columnwise.codes == nullptr) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) forget(y[i]);
    const float amax = column_amax(y, maxima, thread);  // with a barrier
    if (threadIdx.x < kTile) {
      const float scale = scale_of(amax, p.tile.rule);
      const int in_slice = first + static_cast<int>(threadIdx.x);
      scales[threadIdx.x] = scale;
      if (in_slice < slice.columns)
        columnwise
            .scale_inv[slice.first_row / kTile * columnwise.pitch + slice.first_column + in_slice] =
            __frcp_rn(scale);
    }
    __syncthreads();
    float scale[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) scale[j] = scales[thread * 8 + j];
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = encoding.row(y[i], scale);
    auto* units = reinterpret_cast<uint2*>(elements + Shape::at(0, first));
    park_units<Shape>(codes, units, group, thread);
    __syncthreads();
    store_units<Shape>(units, p, slice, first);
  }
}

template <typename T, bool kLayerNorm, int kRows, Granularity G>
__global__ void __launch_bounds__(kPanelThreads, 3)
    norm_panel(const __grid_constant__ PanelParams p) {
  using Shape = PanelShape<kRows>;
  static_assert(G == Granularity::kDelayed || (G == Granularity::kVec128 && kRows == kTile));
  extern __shared__ float4 dynamic[];
  const Slice slice(p, kRows);
  T* elements = reinterpret_cast<T*>(dynamic);
  auto* bytes = reinterpret_cast<uint8_t*>(dynamic) + Shape::elements_bytes(p.slice);
  float* sums = reinterpret_cast<float*>(bytes);
  auto* statistics = reinterpret_cast<RowStatistics*>(bytes + Shape::sums_bytes(slice.chunks));
  cluster_arrive();
  copy_slice<T, Shape>(elements, p, slice);
  // Zeros behind the sums of each row's chunks.
  const int stride = Shape::sums_stride(slice.chunks), behind = stride - slice.chunks;
  for (int i = threadIdx.x; i < kRows * behind; i += kPanelThreads)
    sums[i / behind * stride + slice.chunks + i % behind] = 0.0f;
  wait_for_copies();
  find_statistics<kLayerNorm, T, Shape>(elements, sums, statistics, p, slice);
  if constexpr (G == Granularity::kDelayed)
    cast_slice<T, kLayerNorm, Shape>(elements, statistics, p, slice);
  else
    cast_slice_in_blocks<T, kLayerNorm, Shape>(elements, statistics,
                                               reinterpret_cast<float (*)[kTile]>(sums), p, slice);
}

}  // namespace fp8core
