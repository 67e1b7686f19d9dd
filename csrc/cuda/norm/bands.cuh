// Norms with casts whose scales do not follow from the whole tensor, in one pass over x from
// memory, by one kernel.
//
// x is divided into bands of 128 rows, and a band into tiles, which blocks of threads take in order
// (tile_walk.cuh). Of the rows of a band each tile owns as many: 128 / tiles. A block that begins a
// tile first reads the rows that its next tile owns, writes their statistics, and then casts the
// tile, once the statistics of all rows of its band are written. It reads the tile from the L2
// cache, where the reads of the rows have left it.
//
// Blocks wait for each other, so all must be on the device at once; and a band must not have more
// tiles than there are blocks, since no more than the next tile's rows are done ahead. Statistics
// that are not written yet are kNotWritten.
#pragma once

#include "../divisor.cuh"
#include "norm_source.cuh"

namespace fp8core {

// The bits of a NaN that no computation gives.
constexpr unsigned kNotWritten = 0xFFFFFFFFu;

struct BandInputs : NormSourceInputs {
  float inverse_count, eps;
  Divisor chunks{1};          // of a row
  int num_chunks, most_rows;  // of a row; that a tile owns
};

// Shared memory of a block besides the stages of rows ahead: the statistics of a band's rows, those
// of the rows that a tile owns, their sums of chunks (for LayerNorm twice), and the rows by chunks.
struct BandMemory {
  RowStatistics *of_band, *of_rows;
  float* sums;
  uint4* rows;  // [row, chunk, lane]

  __host__ __device__ static constexpr int sums_stride(int num_chunks) { return num_chunks | 1; }
  __host__ __device__ static constexpr int sums_floats(int num_chunks, int most_rows) {
    return (2 * most_rows * sums_stride(num_chunks) + 3) / 4 * 4;
  }
  __host__ __device__ static constexpr int bytes(int num_chunks, int most_rows) {
    return 2 * kTile * static_cast<int>(sizeof(RowStatistics)) +
           4 * sums_floats(num_chunks, most_rows) + most_rows * num_chunks * kChunk * 2;
  }
  __device__ BandMemory(uint4* memory, const BandInputs& in)
      : of_band(reinterpret_cast<RowStatistics*>(memory)),
        of_rows(of_band + kTile),
        sums(reinterpret_cast<float*>(of_rows + kTile)),
        rows(reinterpret_cast<uint4*>(sums + sums_floats(in.num_chunks, in.most_rows))) {}
};

// Values that other blocks wait for, and that are right by themselves: no order among them is
// needed.
__device__ inline void publish(float* to, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
// A value that is read before it is needed, and again until it is published.
class Awaited {
 public:
  __device__ explicit Awaited(const float* from) : from_(from) { read(); }
  __device__ float value() {
    while (bits_ == kNotWritten) read();
    return __uint_as_float(bits_);
  }

 private:
  __device__ void read() {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits_) : "l"(from_) : "memory");
  }

  const float* from_;
  unsigned bits_;
};

// Finds the statistics of rows ahead of the tiles that need them.
template <typename T, bool kLayerNorm, typename Source>
class BandStatistics {
  static constexpr int kWarps = kTileThreads / 32, kAtOnce = 4;

 public:
  static constexpr int kGroups = 1;

  __device__ BandStatistics(const BandInputs& in, const TileParams& p, unsigned tiles)
      : in_(in), p_(p), tiles_(tiles), memory_(Source::memory(), in) {
    copy_rows(blockIdx.x);
    wait_for_copies<0>();
    write_statistics(blockIdx.x);
    __syncthreads();
    copy_rows(blockIdx.x + gridDim.x);
  }

  // Before a tile is cast; all threads have left the tile before.
  __device__ void begin(unsigned tile, const TileSpan& at) {
    const int64_t row = min(at.row + threadIdx.x % kTile, p_.args.x.rows - 1);
    Awaited rstd(in_.rstd + row), mean(kLayerNorm ? in_.mean + row : in_.rstd + row);
    wait_for_copies<Source::kStages>();  // those of a tile's rows are younger
    write_statistics(tile + gridDim.x);
    copy_rows(tile + 2 * gridDim.x);
    if (threadIdx.x < kTile)
      memory_.of_band[threadIdx.x] = {kLayerNorm ? mean.value() : 0.0f, rstd.value()};
    __syncthreads();
  }

 private:
  struct Rows {
    int64_t first;
    int count;
  };
  // The rows that a tile owns.
  __device__ Rows rows_of(unsigned tile) const {
    if (tile >= tiles_) return {0, 0};
    const int columns = p_.tile_columns, at = static_cast<int>(tile % columns);
    const int begin = kTile * at / columns, end = kTile * (at + 1) / columns;
    const int64_t first = static_cast<int64_t>(tile / columns) * kTile + begin;
    return {first, min(end - begin, left_before(p_.args.x.rows, first))};
  }
  __device__ int row_of(int unit) const {
    return static_cast<int>(in_.chunks.quotient(static_cast<unsigned>(unit)));
  }

  // A warp copies the chunks that it reads, each lane its eight elements.
  __device__ void copy_rows(unsigned tile) {
    const Rows rows = rows_of(tile);
    const int lane = threadIdx.x % 32, cols = static_cast<int>(p_.args.x.cols);
    for (int unit = threadIdx.x / 32; unit < rows.count * in_.num_chunks; unit += kWarps) {
      const int row = row_of(unit), column = (unit - row * in_.num_chunks) * kChunk + lane * 8;
      const T* from = static_cast<const T*>(p_.args.x.data) + (rows.first + row) * p_.args.x.stride;
      copy_16_bytes(memory_.rows + unit * 32 + lane, from + column, column < cols);
    }
    end_copies();
  }

  // Stores the sums over chunks of what share(eight elements, row, columns left) gives.
  template <typename Share>
  __device__ void sum_chunks(int units, float* sums, const Share& share) const {
    constexpr int kLanes = 32 / kAtOnce;
    const int lane = threadIdx.x % 32, cols = static_cast<int>(p_.args.x.cols);
    const int stride = BandMemory::sums_stride(in_.num_chunks);
    for (int first = threadIdx.x / 32; first < units; first += kAtOnce * kWarps) {
      float shares[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = first + i * kWarps;
        shares[i] = 0.0f;
        if (unit >= units) continue;
        const int row = row_of(unit), column = (unit - row * in_.num_chunks) * kChunk + lane * 8;
        Eight<T> x;
        x.bits = memory_.rows[unit * 32 + lane];
        shares[i] = share(x, row, cols - column);
      }
      const float of_chunk = sum_over_lanes(shares);
      const int unit = first + lane / kLanes * kWarps;
      if (lane % kLanes != 0 || unit >= units) continue;
      const int row = row_of(unit);
      sums[row * stride + unit - row * in_.num_chunks] = of_chunk;
    }
  }

  // Calls take(row, sum of its chunks) for the rows, by one of four threads each.
  template <typename Take>
  __device__ void for_row_sums(int rows, const float* sums, const Take& take) const {
    const int stride = BandMemory::sums_stride(in_.num_chunks);
    // All threads of a warp take part in each turn.
    for (int first = 0; first < rows; first += kTileThreads / 4) {
      const int row = first + static_cast<int>(threadIdx.x) / 4;
      const float sum = sum_of_chunks(sums + min(row, rows - 1) * stride, in_.num_chunks);
      if (threadIdx.x % 4 == 0 && row < rows) take(row, sum);
    }
  }

  // Of the rows that a tile owns, which this block has copied.
  __device__ void write_statistics(unsigned tile) {
    const Rows rows = rows_of(tile);
    const int units = rows.count * in_.num_chunks;
    float* sums = memory_.sums;
    if constexpr (kLayerNorm) {
      sum_chunks(units, sums, [](const Eight<T>& x, int, int) {
        return sum_of_eight([&](int j) { return x[j]; });
      });
      __syncthreads();
      for_row_sums(rows.count, sums, [&](int row, float sum) {
        memory_.of_rows[row].mean = __fmul_rn(sum, in_.inverse_count);
      });
      __syncthreads();
      sums += in_.most_rows * BandMemory::sums_stride(in_.num_chunks);
    }
    sum_chunks(units, sums, [&](const Eight<T>& x, int row, int left) {
      float deviations[8];
      deviate<kLayerNorm>(deviations, x, kLayerNorm ? memory_.of_rows[row].mean : 0.0f, 8);
      return left > 0 ? squares_of_eight(deviations) : 0.0f;
    });
    __syncthreads();
    for_row_sums(rows.count, sums, [&](int row, float sum) {
      const int64_t at = rows.first + row;
      if constexpr (kLayerNorm) publish(in_.mean + at, memory_.of_rows[row].mean);
      publish(in_.rstd + at, rstd_of(sum, in_.inverse_count, in_.eps));
    });
  }

  const BandInputs& in_;
  const TileParams& p_;
  const unsigned tiles_;
  const BandMemory memory_;
};

// y as a source of a cast whose rows' statistics are found meanwhile.
template <typename T, typename V, bool kLayerNorm>
struct BandSource : NormSource<T, V, kLayerNorm> {
  using Base = NormSource<T, V, kLayerNorm>;
  using typename Base::Origin;
  using typename Base::Row;
  using Inputs = BandInputs;
  static constexpr int kRows = 2, kStages = 4, kBlocks = 2, kDirectedBlocks = 2;
  struct Stage {
    uint4 x[kRows][kTileThreads];
  };
  using Companion = BandStatistics<T, kLayerNorm, BandSource>;

  static __device__ uint4* memory() {
    extern __shared__ uint4 stages_ahead[];
    return stages_ahead + kStages * sizeof(Stage) / sizeof(uint4);
  }

  const RowStatistics* statistics;  // of the thread's rows

  __device__ BandSource(const Inputs& in, const TileParams& p, const TileSpan& at, int ty, int tx)
      : Base(in, p, at, ty, tx), statistics(BandMemory(memory(), in).of_band + ty * 8) {}

  static __device__ void copy(Stage& to, Origin& from, const Inputs&, const TileParams& p,
                              int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      copy_16_bytes(&to.x[i][threadIdx.x], from.x, first + i < from.rows);
      from.x += p.args.x.stride;
    }
  }
  __device__ void read(Row (&rows)[kRows], const Stage& from, int first) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i].x.bits = from.x[i][threadIdx.x];
      rows[i].statistics = statistics[first + i];
      rows[i].is_inside = first + i < this->origin.rows;
    }
  }
};

}  // namespace fp8core
