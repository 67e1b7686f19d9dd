// y as the source of a cast (quantize/source.cuh): computed from x and the statistics of its rows,
// as the kernels of forward.cuh do, and rounded to T before the cast unless V is float.
#pragma once

#include "../quantize/source.cuh"
#include "row.cuh"

namespace fp8core {

struct NormSourceInputs {
  Affine affine;
  const float *mean = nullptr, *rstd = nullptr;
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
  static constexpr int kParts = 1, kRows = 2;
  static constexpr bool kSums = false;
  static constexpr int kBlocks = kLayerNorm ? 3 : 4, kDirectedBlocks = kLayerNorm ? 2 : 3;
  static constexpr Formats kFormats = Formats::kShared;
  static constexpr bool takes(Granularity granularity) {
    if (std::is_same_v<V, float>) return granularity == Granularity::kDelayed;
    return granularity != Granularity::kBlock128;
  }

  const Inputs& in;
  const T* from;
  int64_t stride, first_row;
  int rows;  // how many are left in x from the thread's first on; none if the columns are not
  float gamma[8], beta[8];

  __device__ NormSource(const Inputs& in, const TileParams& p, const TileSpan& at, int ty, int tx)
      : in(in), stride(p.args.x.stride), first_row(at.row + ty * 8), rows(0) {
    const int64_t column = at.column + tx * 8;
    from = static_cast<const T*>(p.args.x.data) + first_row * stride + column;
    if (column >= at.column_end) return;
    rows = left_before(at.load_end, first_row);
    in.affine.read_gamma(gamma, static_cast<int>(column), 8, true);
    if constexpr (kLayerNorm) in.affine.read_beta(beta, static_cast<int>(column), 8, true);
  }
  template <Reading kReading = Reading::kOnce, int kCount>
  __device__ void load(Row (&row)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      row[i].is_inside = first + i < rows;
      if (!row[i].is_inside) continue;
      if constexpr (kReading == Reading::kAgain)
        row[i].x.load_kept(from + (first + i) * stride);
      else
        row[i].x.load(from + (first + i) * stride);
      if constexpr (kLayerNorm) row[i].statistics.mean = __ldg(in.mean + first_row + first + i);
      row[i].statistics.rstd = __ldg(in.rstd + first_row + first + i);
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
