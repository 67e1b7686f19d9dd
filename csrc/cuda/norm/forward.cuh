// Normalizes rows. Rows of whole vectors stay in registers between their statistics and the result
// (norm_rows); others, and longer ones, are read again (norm_long_rows).
#pragma once

#include "row.cuh"

namespace fp8core {

struct NormParams {
  NormArguments args;
  Affine affine;
  InputType output;
  float inverse_count, eps;
  bool vectors;   // all that is read and written per row comes in whole vectors
  bool one_type;  // which x, y and the parameters have
};

constexpr int kNormThreads = 1024;   // at most
constexpr int kNormChunks = 4 * 32;  // that a block holds in registers at most

// x + residual, rounded to T, becomes x, and is stored.
template <typename T>
__device__ void add_residual(Eight<T>& x, const Eight<T>& residual, const NormParams& p, int64_t at,
                             int count, bool vectors) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(x[i], residual[i]);
  x = rounded<T>(sum);
  store_eight(static_cast<T*>(p.args.sum) + at, x, count, vectors);
}

template <bool kLayerNorm>
__device__ void store_statistics(const RowStatistics& row, const NormParams& p, int64_t at) {
  if constexpr (kLayerNorm) p.args.mean[at] = row.mean;
  p.args.rstd[at] = row.rstd;
}

// y of a held row, of whose elements the mean is subtracted. `kOneType`: x, y and the parameters
// are of type T.
template <typename T, bool kOneType, bool kLayerNorm, int kVectors>
__device__ void store_held_row(const float (&x)[kVectors][8], float rstd, const NormParams& p,
                               int64_t row_start, const Team& team) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!team.has(i)) continue;
    const int column = team.column(i);
    float gamma[8], beta[8], y[8];
    if constexpr (kOneType)
      p.affine.template read_gamma_as<T>(gamma, column);
    else
      p.affine.read_gamma(gamma, column, 8, true);
    if constexpr (kLayerNorm && kOneType) p.affine.template read_beta_as<T>(beta, column);
    if constexpr (kLayerNorm && !kOneType) p.affine.read_beta(beta, column, 8, true);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      y[j] = scaled<kLayerNorm>(__fmul_rn(x[i][j], rstd), gamma[j], kLayerNorm ? beta[j] : 0.0f);
    if constexpr (kOneType)
      round_and_store<T>(p.args.y, row_start + column, y, 8, true);
    else
      store_values(p.args.y, p.output, row_start + column, y, 8, true);
  }
}

// A team works on one row; another block on the next.
template <typename T, int kVectors, bool kLayerNorm, bool kAdd>
__global__ void __launch_bounds__(kNormThreads, 1) norm_rows(const __grid_constant__ NormParams p) {
  __shared__ float shared[2 * kNormChunks];
  const Matrix& m = p.args.x;
  const Team team(m.cols);
  const int64_t at = team.first_row(), row_start = at * m.cols;
  if (at >= m.rows) return;
  Eight<T> raw[kVectors];
  load_row(raw, m.data, at * m.stride, team);
  if constexpr (kAdd) {
    Eight<T> residual[kVectors];
    load_row(residual, p.args.residual, at * p.args.residual_stride, team);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (team.has(i)) add_residual(raw[i], residual[i], p, row_start + team.column(i), 8, true);
  }
  float x[kVectors][8];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) unpack(x[i], raw[i]);
  const int stride = team.warps * kVectors;
  const RowStatistics row = statistics_of<kLayerNorm>(x, team, p.inverse_count, p.eps,
                                                      shared + 2 * stride * threadIdx.y, stride);
  if (team.warp == 0 && team.lane == 0) store_statistics<kLayerNorm>(row, p, at);
  if (p.one_type)
    store_held_row<T, true, kLayerNorm>(x, row.rstd, p, row_start, team);
  else
    store_held_row<T, false, kLayerNorm>(x, row.rstd, p, row_start, team);
}

// Rows of any length and alignment: a team reads each row once for the mean, once for the mean
// square and once for the result, a segment of chunks at a time.
constexpr int kLongVectors = 2;

template <typename T, bool kLayerNorm, bool kAdd>
__global__ void __launch_bounds__(kNormThreads, 1)
    norm_long_rows(const __grid_constant__ NormParams p) {
  __shared__ float shared[2 * kNormChunks];
  const Matrix& m = p.args.x;
  const Team team(m.cols);
  const int segment = team.warps * kLongVectors;
  float* buffers = shared + 2 * segment * threadIdx.y;
  int turn = 0;
  for (int64_t at = team.first_row(); at < m.rows; at += team.row_step()) {
    const int64_t row_start = at * m.cols;
    bool is_summed = false;
    // Calls `work` with eight elements and how many columns are left. The first time it adds the
    // residual; then the sum is read, by the threads that wrote it.
    const auto for_eight = [&](int column, const auto& work) {
      const int count = team.cols - column;
      Eight<T> x;
      if (kAdd && is_summed) {
        load_eight(x, static_cast<const T*>(p.args.sum) + row_start + column, count, p.vectors);
      } else {
        load_eight(x, static_cast<const T*>(m.data) + at * m.stride + column, count, p.vectors);
        if constexpr (kAdd) {
          const T* from = static_cast<const T*>(p.args.residual) + at * p.args.residual_stride;
          Eight<T> residual;
          load_eight(residual, from + column, count, p.vectors);
          add_residual(x, residual, p, row_start + column, count, p.vectors);
        }
      }
      work(x, count);
    };
    // The sum over the row of what `share` makes of eight elements.
    const auto sum_over_row = [&](const auto& share) {
      RunningSums running;
      for (int start = 0; start * kChunk < team.cols; start += segment, turn ^= 1) {
        float* chunks = buffers + turn * segment;
        for (int i = team.warp; i < segment; i += team.warps) {
          float sum = 0.0f;
          for_eight((start + i) * kChunk + team.lane * 8,
                    [&](const Eight<T>& x, int count) { sum = share(x, count); });
          sum = chunk_sum(sum);
          if (team.lane == 0) chunks[i] = sum;
        }
        team.wait();
        running.add(chunks, segment);
      }
      is_summed = true;
      return running.total();
    };
    RowStatistics row;
    if constexpr (kLayerNorm)
      row.mean = __fmul_rn(sum_over_row([](const Eight<T>& x, int) {
                             return sum_of_eight([&](int j) { return x[j]; });
                           }),
                           p.inverse_count);
    row.rstd = rstd_of(sum_over_row([&](const Eight<T>& x, int count) {
                         float deviations[8];
                         deviate<kLayerNorm>(deviations, x, row.mean, count);
                         return squares_of_eight(deviations);
                       }),
                       p.inverse_count, p.eps);
    if (team.warp == 0 && team.lane == 0) store_statistics<kLayerNorm>(row, p, at);
    for (int column = (team.warp * 32 + team.lane) * 8; column < team.cols;
         column += team.warps * kChunk)
      for_eight(column, [&](const Eight<T>& x, int count) {
        float gamma[8], beta[8], y[8];
        p.affine.read_gamma(gamma, column, count, p.vectors);
        if constexpr (kLayerNorm) p.affine.read_beta(beta, column, count, p.vectors);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          y[j] = normalized<kLayerNorm>(x[j], row, gamma[j], kLayerNorm ? beta[j] : 0.0f);
        store_values(p.args.y, p.output, row_start + column, y, count, p.vectors);
      });
  }
}

}  // namespace fp8core
