// y as the source of a cast (quantize/source.cuh): computed from x and the statistics of its rows,
// as the kernels of forward.cuh do, and rounded to T before the cast unless V is float.
#pragma once

#include "../copies.cuh"
#include "../quantize/source.cuh"
#include "row.cuh"

namespace fp8core {

struct NormSourceInputs {
  Affine affine;
  float *mean = nullptr, *rstd = nullptr;
  static constexpr float* tile_sums = nullptr;
};

template <typename T, typename V, bool kLayerNorm>
struct NormSource {
  using Value = V;
  using Inputs = NormSourceInputs;
  struct Row {
    Eight<T> x;
    RowStatistics statistics;
    bool is_inside;
  };
  static constexpr int kParts = 1, kRows = 2, kStages = 4;
  static constexpr bool kSums = false, kReadBefore = true;
  static constexpr int kBlocks = 3, kDirectedBlocks = kLayerNorm ? 2 : 3;
  static constexpr Formats kFormats = Formats::kShared;
  static constexpr bool takes(Granularity granularity) {
    if (std::is_same_v<V, float>) return granularity == Granularity::kDelayed;
    return granularity != Granularity::kBlock128;
  }

  struct Origin {
    const T* x = nullptr;
    int64_t row = 0;
    int rows = 0;  // how many are left in x from the first on; none if the columns are not

    Origin() = default;
    __device__ Origin(const Inputs&, const TileParams& p, const TileSpan& at, int ty, int tx)
        : row(at.row + ty * 8) {
      const int64_t column = at.column + tx * 8;
      x = static_cast<const T*>(p.args.x.data) + row * p.args.x.stride + column;
      rows = column < at.column_end ? left_before(at.load_end, row) : 0;
    }
  };
  struct Stage {
    uint4 x[kRows][kTileThreads];
    float mean[kLayerNorm ? kRows : 1][kTileThreads], rstd[kRows][kTileThreads];
  };

  const Inputs& in;
  const Origin origin;
  int64_t stride;
  float gamma[8], beta[8];

  __device__ NormSource(const Inputs& in, const TileParams& p, const TileSpan& at, int ty, int tx)
      : in(in), origin(in, p, at, ty, tx), stride(p.args.x.stride) {
    const int64_t column = at.column + tx * 8;
    if (column >= at.column_end) return;
    in.affine.read_gamma(gamma, static_cast<int>(column), 8, true);
    if constexpr (kLayerNorm) in.affine.read_beta(beta, static_cast<int>(column), 8, true);
  }

  static __device__ void copy(Stage& to, Origin& from, const Inputs& in, const TileParams& p,
                              int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_inside = first + i < from.rows;
      copy_16_bytes(&to.x[i][threadIdx.x], from.x, is_inside);
      if constexpr (kLayerNorm) copy_float(&to.mean[i][threadIdx.x], in.mean + from.row, is_inside);
      copy_float(&to.rstd[i][threadIdx.x], in.rstd + from.row, is_inside);
      from.x += p.args.x.stride;
      ++from.row;
    }
  }
  __device__ void read(Row (&rows)[kRows], const Stage& from, int first) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i].x.bits = from.x[i][threadIdx.x];
      if constexpr (kLayerNorm) rows[i].statistics.mean = from.mean[i][threadIdx.x];
      rows[i].statistics.rstd = from.rstd[i][threadIdx.x];
      rows[i].is_inside = first + i < origin.rows;
    }
  }
  template <int kCount>
  __device__ void load(Row (&row)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      row[i].is_inside = first + i < origin.rows;
      if (!row[i].is_inside) continue;
      row[i].x.load(origin.x + (first + i) * stride);
      if constexpr (kLayerNorm) row[i].statistics.mean = __ldcg(in.mean + origin.row + first + i);
      row[i].statistics.rstd = __ldcg(in.rstd + origin.row + first + i);
    }
  }
  __device__ void values(const Row& row, Eight<V> (&y)[1]) const {
    clear(y[0]);
    if (!row.is_inside) return;
    float exact[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      exact[j] =
          normalized<kLayerNorm>(row.x[j], row.statistics, gamma[j], kLayerNorm ? beta[j] : 0.0f);
    y[0] = rounded<V>(exact);
  }
};

}  // namespace fp8core
