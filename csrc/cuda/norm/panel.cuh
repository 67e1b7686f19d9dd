// Norms with casts, in one pass over x: a cluster of blocks takes a panel of kRows rows, and each
// block of it a slice of their columns, which it copies to shared memory and reads from there.
//
//     1. each warp adds up chunks of the slice (statistics.cuh) and gives the sums to all blocks
//        of the cluster; for LayerNorm twice, as the squares are those of deviations from the mean
//     2. each block adds up the chunks of whole rows, and so has their statistics
//     3. it normalizes and casts its slice, a pass of 32 or 64 KiB at a time, 8 x 8 elements a
//     thread
//
// Clusters stay, and take panel after panel. Passes lie in a ring of slots: when one is cast, its
// slot takes a pass of the panel that comes next, so that memory is read while the block computes.
//
// When the elements of a pass are in registers, its slot takes the codes, transposed, in units of
// eight bytes (8 rows of a column): column 8 tx + j of row group ty lies at [j][ty][tx ^ turn(ty)].
// The exclusive or spreads the units that a half-warp reads over all banks; those that it writes
// are adjacent anyway.
#pragma once

#include "../copies.cuh"
#include "../quantize/tile_parts.cuh"
#include "exchange.cuh"
#include "row.cuh"

namespace fp8core {

struct PanelParams {
  TileParams tile;
  Affine affine;
  float *mean, *rstd;
  float inverse_count, eps;
  int slice;    // chunks of a block
  int slots;    // passes that shared memory holds; at least those of a slice
  bool rounds;  // y to x's type, before it is cast
};

template <int kRowsOfPanel, int kThreadsOfBlock>
struct PanelShape {
  static constexpr int kRows = kRowsOfPanel, kBlock = kThreadsOfBlock, kWarps = kBlock / 32;
  static constexpr int kGroups = kRows / 8;          // of rows that a thread holds
  static constexpr int kThreads = kBlock / kGroups;  // to a row
  static constexpr int kPass = kThreads * 8;         // columns
  static constexpr int kPassElements = kRows * kPass;
  static constexpr bool kHasMaxima = kRows == kTile;  // of columns, for kVec128

  __host__ __device__ static constexpr int passes(int slice) {
    return (slice * kChunk + kPass - 1) / kPass;
  }

  // Shared memory: slots, two buffers of sums of chunks, statistics; then maxima of columns and
  // their scales. The sums of two rows are an odd number of floats apart, so that threads that each
  // read a row meet in few banks.
  __host__ __device__ static constexpr int sums_stride(int chunks) { return chunks | 1; }
  __host__ __device__ static constexpr int slots_bytes(int slots) {
    return slots * kPassElements * 2;
  }
  __host__ __device__ static constexpr int sums_bytes(int chunks) {
    return 2 * kRows * sums_stride(chunks) * 4;
  }
  __host__ __device__ static constexpr int bytes(int slots, int chunks) {
    return slots_bytes(slots) + sums_bytes(chunks) + kRows * 8 +
           (kHasMaxima ? (kWarps + 1) * kPass * 4 : 0);
  }

  static constexpr int kColumnUnits = kGroups * kThreads;  // from a thread's column to its next
  __device__ static int unit_at(int group, int thread) {   // of its first
    return group * kThreads + (thread ^ (group / 2 * (32 / kGroups)));
  }
};

// A block's slice of a panel.
struct Slice {
  int64_t first_row = 0, rows;  // of the panel; of x
  int first_column, columns;
  int chunks, first_chunk, own_chunks;  // of a row; of the slice

  __device__ explicit Slice(const PanelParams& p) : rows(p.tile.args.x.rows) {
    const int cols = static_cast<int>(p.tile.args.x.cols);
    chunks = (cols + kChunk - 1) / kChunk;
    first_chunk = static_cast<int>(cluster_rank()) * p.slice;
    own_chunks = max(0, min(p.slice, chunks - first_chunk));
    first_column = first_chunk * kChunk;
    columns = max(0, min(own_chunks * kChunk, cols - first_column));
  }
};

// The ring of slots. Passes are counted from the cluster's first panel on.
template <typename T, typename Shape>
struct Ring {
  const PanelParams& p;
  const Slice& slice;
  T* slots;
  int passes;          // of a slice
  int64_t panel_step;  // rows from a panel of this cluster to its next
  int64_t next_row;    // of the panel of the pass that is copied next
  int next_pass = 0, next_slot = 0;
  int first_slot = 0;  // of the panel that is worked on

  __device__ Ring(const PanelParams& p, const Slice& slice, T* slots)
      : p(p),
        slice(slice),
        slots(slots),
        passes(Shape::passes(p.slice)),
        panel_step(static_cast<int64_t>(gridDim.x / cluster_blocks()) * Shape::kRows),
        next_row(static_cast<int64_t>(blockIdx.x / cluster_blocks()) * Shape::kRows) {}

  // A pass of the present panel.
  __device__ T* slot_of(int pass) const {
    const int slot = first_slot + pass;
    return slots + (slot < p.slots ? slot : slot - p.slots) * Shape::kPassElements;
  }
  // Where a row of a pass has the element of a column of the slice.
  __device__ T* at(int row, int column) const {
    return slot_of(column / Shape::kPass) + row * Shape::kPass + column % Shape::kPass;
  }

  // Begins to copy the next pass, a thread 8 vectors of it, to a slot that is free.
  __device__ void copy_next() {
    if (next_row < slice.rows) copy_pass();
    end_copies();
    if (++next_slot == p.slots) next_slot = 0;
    if (++next_pass == passes) next_pass = 0, next_row += panel_step;
  }
  __device__ void copy_pass() const {
    const Matrix& x = p.tile.args.x;
    const int thread = threadIdx.x % Shape::kThreads,
              column = next_pass * Shape::kPass + thread * 8;
    const int first = threadIdx.x / Shape::kThreads;
    const int64_t row = next_row + first;
    const T* from = static_cast<const T*>(x.data) + row * x.stride + slice.first_column + column;
    T* to = slots + next_slot * Shape::kPassElements + first * Shape::kPass + thread * 8;
    const int rows = column < slice.columns ? left_before(slice.rows, row) : 0;
    const int64_t step = Shape::kGroups * x.stride;
#pragma unroll
    for (int i = 0; i < 8; ++i, from += step)
      copy_16_bytes(to + i * Shape::kGroups * Shape::kPass, from, i * Shape::kGroups < rows);
  }
  // Waits for the passes of the present panel, which all threads have then copied.
  __device__ void wait_for_panel() const {
    if (p.slots == passes)
      wait_for_copies<0>();
    else
      wait_for_copies<1>();
    __syncthreads();
  }
  __device__ void leave_panel() {
    first_slot += passes;
    if (first_slot >= p.slots) first_slot -= p.slots;
  }
};

template <typename T>
__device__ Eight<T> eight_at(const T* shared) {
  Eight<T> x;
  x.bits = *reinterpret_cast<const uint4*>(shared);
  return x;
}

// Gives all blocks what share(eight elements, row, how many of them are in the row) gives, summed
// over each chunk.
template <typename T, typename Shape, typename Share>
__device__ void share_sums(const Ring<T, Shape>& ring, const Exchange& exchange, const Slice& slice,
                           const Share& share) {
  constexpr int kAtOnce = 4, kLanes = 32 / kAtOnce;
  const int lane = threadIdx.x % 32, stride = Shape::sums_stride(slice.chunks);
  const unsigned blocks = cluster_blocks();
  exchange.begin();
  for (int chunk = 0; chunk < slice.own_chunks; ++chunk) {
    const int column = chunk * kChunk + lane * 8, inside = column < slice.columns ? 8 : 0;
    const T* from = ring.at(0, column);
    for (int first = threadIdx.x / 32; first < Shape::kRows; first += kAtOnce * Shape::kWarps) {
      float shares[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * Shape::kWarps;
        shares[i] = share(eight_at(from + row * Shape::kPass), row, inside);
      }
      const float of_chunk = sum_over_lanes(shares);
      const int row = first + lane / kLanes * Shape::kWarps;
#pragma unroll 1
      for (unsigned block = lane % kLanes; block < blocks; block += kLanes)
        exchange.give(row * stride + slice.first_chunk + chunk, block, of_chunk);
    }
  }
}

// Calls take(row, sum of its chunks) for all rows of the panel, by four threads each.
template <typename Shape, typename Take>
__device__ void for_row_sums(const float* sums, const Slice& slice, const Take& take) {
  const int stride = Shape::sums_stride(slice.chunks);
  for (int row = threadIdx.x / 4; row < Shape::kRows; row += Shape::kBlock / 4) {
    const float sum = sum_of_chunks(sums + row * stride, slice.chunks);
    if (threadIdx.x % 4 == 0) take(row, sum);
  }
}

// The statistics of all rows of the panel, to shared and, by one block, to global memory.
template <bool kLayerNorm, typename T, typename Shape>
__device__ void find_statistics(const Ring<T, Shape>& ring, Exchange* exchange,
                                RowStatistics* statistics, const PanelParams& p,
                                const Slice& slice) {
  if constexpr (kLayerNorm) {
    share_sums(ring, *exchange, slice, [](const Eight<T>& x, int, int) {
      float values[8];
      unpack(values, x);
      return sum_of_eight([&](int j) { return values[j]; });
    });
    for_row_sums<Shape>(exchange->take(), slice, [&](int row, float sum) {
      statistics[row].mean = __fmul_rn(sum, p.inverse_count);
    });
    __syncthreads();
  }
  share_sums(ring, *exchange, slice, [&](const Eight<T>& x, int row, int inside) {
    float deviations[8];
    deviate<kLayerNorm>(deviations, x, kLayerNorm ? statistics[row].mean : 0.0f, inside);
    return squares_of_eight(deviations);
  });
  for_row_sums<Shape>(exchange->take(), slice, [&](int row, float sum) {
    const float rstd = rstd_of(sum, p.inverse_count, p.eps);
    statistics[row].rstd = rstd;
    if (slice.first_chunk == 0 && slice.first_row + row < slice.rows) {
      p.rstd[slice.first_row + row] = rstd;
      if constexpr (kLayerNorm) p.mean[slice.first_row + row] = statistics[row].mean;
    }
  });
  __syncthreads();
}

template <typename V, typename Scale>
__device__ uint2 encode_unpacked(const Eight<V>& y, const Scale& scale) {
  float values[8];
  unpack(values, y);
  return encode_row<Format::kE4M3>(rounded<float>(values), scale);
}

// A thread's 8 x 8 elements of a pass, in shared memory.
template <typename T, bool kLayerNorm, typename Shape>
struct PanelUnit {
  const PanelParams& p;
  const T* elements;
  const RowStatistics* statistics;  // of the thread's rows
  int64_t row;
  int rows;  // how many are left in x from the first of the eight on; none if the columns are not
  int column;
  uint8_t* codes;  // of the first row
  float gamma[8], beta[8];

  __device__ PanelUnit(const PanelParams& p, const Slice& slice, const T* slot,
                       const RowStatistics* of_panel, int first, int group, int thread)
      : p(p),
        elements(slot + group * 8 * Shape::kPass + thread * 8),
        statistics(of_panel + group * 8),
        row(slice.first_row + group * 8),
        rows(0),
        column(slice.first_column + first + thread * 8),
        codes(p.tile.args.rowwise.codes) {
    if (first + thread * 8 >= slice.columns) return;
    rows = left_before(slice.rows, row);
    if (codes != nullptr) codes += row * p.tile.args.x.cols + column;
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
    float values[8], exact[8];
    unpack(values, x);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      exact[j] = normalized<kLayerNorm>(values[j], of_row, gamma[j], kLayerNorm ? beta[j] : 0.0f);
    return rounded<V>(exact);
  }
  __device__ void store_row(int i, uint2 of_row) const {
    if (codes == nullptr || i >= rows) return;
    uint8_t* to = codes + i * static_cast<int>(p.tile.args.x.cols);
    __stcs(reinterpret_cast<uint2*>(to), of_row);
  }
};

// Puts the thread's codes into the memory of its pass, transposed; the threads have read it.
template <typename Shape>
__device__ void park_units(const uint2 (&codes)[8], uint2* units, int group, int thread) {
  units += Shape::unit_at(group, thread);
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
      units[(half * 4 + j) * Shape::kColumnUnits] = make_uint2(top[j], bottom[j]);
  }
}

// A thread stores 16 codes of each second of eight adjacent columns.
template <typename Shape>
__device__ void store_units(const uint2* units, const PanelParams& p, const Slice& slice,
                            int first) {
  constexpr int kVectors = Shape::kRows / 16;  // of 16 codes of a column
  static_assert(Shape::kBlock == 2 * kVectors * Shape::kThreads);
  const int vector = threadIdx.x % kVectors, thread = threadIdx.x / kVectors % Shape::kThreads,
            odd = threadIdx.x / (kVectors * Shape::kThreads);
  const int64_t row = slice.first_row + vector * 16;
  const int rows = left_before(slice.rows, row), in_slice = first + thread * 8;
  if (in_slice >= slice.columns || rows <= 0) return;
  const int64_t pitch = p.tile.args.column_pitch;
  uint8_t* to = p.tile.args.columnwise.codes + (slice.first_column + in_slice + odd) * pitch + row;
  const bool is_whole = p.tile.vector_columns && rows >= 16;
  const uint2 *lower = units + Shape::unit_at(2 * vector, thread) + odd * Shape::kColumnUnits,
              *upper = units + Shape::unit_at(2 * vector + 1, thread) + odd * Shape::kColumnUnits;
#pragma unroll
  for (int j = 0; j < 8; j += 2, to += 2 * pitch) {
    const uint2 low = lower[j * Shape::kColumnUnits], high = upper[j * Shape::kColumnUnits];
    if (is_whole) {
      __stcs(reinterpret_cast<uint4*>(to), make_uint4(low.x, low.y, high.x, high.y));
    } else {
      store_bytes(to, low, rows);
      store_bytes(to + 8, high, rows - 8);
    }
  }
}

// The amax of a unit's values, NaN left out, and how many are NaN or inf; `largest` is taken of
// all.
template <typename V, typename Unit>
__device__ float record_values(const Unit& unit, const Largest<V>& largest,
                               unsigned long long* nonfinite) {
  if (__all_sync(0xFFFFFFFFu, largest.is_finite())) return largest.amax();
  float amax = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const Eight<V> y = unit.template values_as<V>(i);
    amax = fmaxf(amax, y.amax());
    count_nonfinite<V, Eight<V>::kWords>([&](int j) { return y.word(j); }, nonfinite);
  }
  return amax;
}

// A pass with one scale, which is given (kDelayed), of values that are rounded to V: codes are the
// same both ways. Returns the amax of the thread's values, if it is asked for.
template <typename V, bool kLayerNorm, typename T, typename Shape>
__device__ float cast_pass(T* slot, const RowStatistics* statistics, float scale,
                           const PanelParams& p, const Slice& slice, int first) {
  const int group = threadIdx.x / Shape::kThreads, thread = threadIdx.x % Shape::kThreads;
  const PanelUnit<T, kLayerNorm, Shape> unit(p, slice, slot, statistics, first, group, thread);
  Largest<V> largest;
  uint2 codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Eight<V> y = unit.template values_as<V>(i);
#pragma unroll
    for (int j = 0; j < Eight<V>::kWords; ++j) largest.take(y.word(j));
    codes[i] = encode_unpacked(y, scale);
    unit.store_row(i, codes[i]);
  }
  float amax = 0.0f;
  if (p.tile.args.amax_out != nullptr || p.tile.args.nonfinite != nullptr)
    amax = record_values(unit, largest, p.tile.args.nonfinite);
  if (p.tile.args.columnwise.codes == nullptr) return amax;
  auto* units = reinterpret_cast<uint2*>(slot);
  __syncthreads();
  park_units<Shape>(codes, units, group, thread);
  __syncthreads();
  store_units<Shape>(units, p, slice, first);
  return amax;
}

// The maxima of a pass's columns over the panel's rows: thread t has that of column t, if there is
// one. With a barrier.
template <typename T, typename Shape>
__device__ float maximum_of_column(const Eight<T> (&y)[8], float (*of_warps)[Shape::kPass]) {
  const int thread = threadIdx.x % Shape::kThreads;
  float maxima[8];
  column_maxima(y, maxima);
  if constexpr (Shape::kThreads == 16) {  // a warp has two groups of rows
#pragma unroll
    for (int j = 0; j < 8; ++j)
      maxima[j] = fmaxf(maxima[j], __shfl_xor_sync(0xFFFFFFFFu, maxima[j], 16));
  }
  if (threadIdx.x % 32 < Shape::kThreads) {
    auto* to = reinterpret_cast<float4*>(of_warps[threadIdx.x / 32] + thread * 8);
    to[0] = make_float4(maxima[0], maxima[1], maxima[2], maxima[3]);
    to[1] = make_float4(maxima[4], maxima[5], maxima[6], maxima[7]);
  }
  __syncthreads();
  float largest = 0.0f;
  if (threadIdx.x < Shape::kPass) {
#pragma unroll
    for (int i = 0; i < Shape::kWarps; ++i) largest = fmaxf(largest, of_warps[i][threadIdx.x]);
  }
  return largest;
}

// A pass with a scale for each 128 elements along k (kVec128): those of a row for the rowwise
// codes, those of a column for the others. `maxima` holds [warps + 1, columns of a pass].
template <bool kLayerNorm, typename T, typename Shape>
__device__ void cast_pass_in_blocks(T* slot, const RowStatistics* statistics,
                                    float (*maxima)[Shape::kPass], const PanelParams& p,
                                    const Slice& slice, int first) {
  const int group = threadIdx.x / Shape::kThreads, thread = threadIdx.x % Shape::kThreads;
  const QuantizeOutput &rowwise = p.tile.args.rowwise, &columnwise = p.tile.args.columnwise;
  const PanelUnit<T, kLayerNorm, Shape> unit(p, slice, slot, statistics, first, group, thread);
  Eight<T> y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = unit.template values_as<T>(i);
  count_nonfinite<T, 32>([&](int i) { return y[i / 4].word(i % 4); }, p.tile.args.nonfinite);
  uint2 codes[8];
  if (rowwise.codes != nullptr) {
    const int in_tile = thread % 16;  // of 16 threads that share rows of 128 elements
    const int column = first + thread / 16 * kTile;
    const int64_t row = slice.first_row + group * 8 + in_tile / 2;
    const float scale = scale_of(row_amax(y, in_tile), p.tile.rule);
    if (in_tile % 2 == 0 && row < slice.rows && column < slice.columns)
      rowwise.scale_inv[(slice.first_column + column) / kTile * rowwise.pitch + row] =
          __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float row_scale = __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16);
      unit.store_row(i, encode_unpacked(y[i], row_scale));
    }
  }
  if (columnwise.codes == nullptr) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) forget(y[i]);
  float* scales = maxima[Shape::kWarps];
  const float amax = maximum_of_column<T, Shape>(y, maxima);
  if (threadIdx.x < Shape::kPass) {
    const float scale = scale_of(amax, p.tile.rule);
    const int column = first + static_cast<int>(threadIdx.x);
    scales[threadIdx.x] = scale;
    if (column < slice.columns)
      columnwise
          .scale_inv[slice.first_row / kTile * columnwise.pitch + slice.first_column + column] =
          __frcp_rn(scale);
  }
  __syncthreads();
  float scale[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scale[j] = scales[thread * 8 + j];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = encode_unpacked(y[i], scale);
  auto* units = reinterpret_cast<uint2*>(slot);
  park_units<Shape>(codes, units, group, thread);
  __syncthreads();
  store_units<Shape>(units, p, slice, first);
}

template <typename T, bool kLayerNorm, int kRows, int kBlock, Granularity G>
__global__ void __launch_bounds__(kBlock, kBlock == 256 ? 3 : 1)
    norm_panel(const __grid_constant__ PanelParams p) {
#ifdef FP8CORE_HAS_CLUSTERS
  using Shape = PanelShape<kRows, kBlock>;
  static_assert(G == Granularity::kDelayed || (G == Granularity::kVec128 && Shape::kHasMaxima));
  extern __shared__ float4 dynamic[];
  __shared__ float shared[kBlock / 32];
  __shared__ uint64_t barriers[2];
  Slice slice(p);
  auto* bytes = reinterpret_cast<uint8_t*>(dynamic);
  float* sums = reinterpret_cast<float*>(bytes + Shape::slots_bytes(p.slots));
  auto* statistics =
      reinterpret_cast<RowStatistics*>(sums + 2 * kRows * Shape::sums_stride(slice.chunks));
  auto* maxima = reinterpret_cast<float (*)[Shape::kPass]>(statistics + kRows);
  Ring<T, Shape> ring(p, slice, reinterpret_cast<T*>(dynamic));
  Exchange exchange(sums, barriers, kRows * Shape::sums_stride(slice.chunks), kRows * slice.chunks);
  cluster_arrive();
  float scale = 1.0f, amax = 0.0f;
  if constexpr (G == Granularity::kDelayed) {
    scale = *p.tile.args.scale;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tile.args.rowwise.scale_inv = __frcp_rn(scale);
  }
  slice.first_row = ring.next_row;
  for (int i = 0; i < p.slots; ++i) ring.copy_next();
  cluster_wait();
  for (; slice.first_row < slice.rows; slice.first_row += ring.panel_step) {
    ring.wait_for_panel();
    find_statistics<kLayerNorm>(ring, &exchange, statistics, p, slice);
    for (int pass = 0; pass < ring.passes; ++pass) {
      T* slot = ring.slot_of(pass);
      const int first = pass * Shape::kPass;
      if (first < slice.columns) {
        if constexpr (G == Granularity::kVec128)
          cast_pass_in_blocks<kLayerNorm, T, Shape>(slot, statistics, maxima, p, slice, first);
        else if (p.rounds)
          amax = fmaxf(
              amax, cast_pass<T, kLayerNorm, T, Shape>(slot, statistics, scale, p, slice, first));
        else
          amax = fmaxf(amax, cast_pass<float, kLayerNorm, T, Shape>(slot, statistics, scale, p,
                                                                    slice, first));
      }
      __syncthreads();  // the slot is free
      ring.copy_next();
    }
    ring.leave_panel();
  }
  if constexpr (G == Granularity::kDelayed) {
    if (p.tile.args.amax_out == nullptr) return;
    amax = block_max<kBlock>(amax, shared);
    if (threadIdx.x == 0) atomic_amax(p.tile.args.amax_out, amax);
  }
#endif
}

}  // namespace fp8core
