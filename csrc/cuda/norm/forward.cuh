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
  int warps;     // of a team
  bool vectors;  // all that is read and written per row comes in whole vectors
};

// Whether the next row is loaded while this one is worked on: a thread has 64 registers, of which
// the next row may take 16, and a bias 8 of these.
template <typename T, int kVectors, bool kLayerNorm, bool kAdd>
constexpr bool loads_ahead = sizeof(T) * kVectors * (kAdd ? 2 : 1) + (kLayerNorm ? 4 : 0) <= 8;

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

template <typename T, bool kLayerNorm>
__device__ void normalize_eight(const Eight<T>& x, const RowStatistics& row, const NormParams& p,
                                int64_t row_start, int column, int count, bool vectors) {
  float gamma[8], beta[8], y[8];
  p.affine.read_gamma(gamma, column, count, vectors);
  if constexpr (kLayerNorm) p.affine.read_beta(beta, column, count, vectors);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    y[j] = normalized<kLayerNorm>(x[j], row, gamma[j], kLayerNorm ? beta[j] : 0.0f);
  store_values(p.args.y, p.output, row_start + column, y, count, vectors);
}

template <bool kLayerNorm>
__device__ void store_statistics(const RowStatistics& row, const NormParams& p, int64_t at) {
  if constexpr (kLayerNorm) p.args.mean[at] = row.mean;
  p.args.rstd[at] = row.rstd;
}

template <typename T, int kVectors, bool kLayerNorm, bool kAdd>
__global__ void __launch_bounds__(kNormThreads) norm_rows(const __grid_constant__ NormParams p) {
  constexpr bool kAhead = loads_ahead<T, kVectors, kLayerNorm, kAdd>;
  __shared__ alignas(16) float shared[2 * kNormChunks];
  const Matrix& m = p.args.x;
  const Team team(p.warps, m.cols);
  const int stride = (team.warps * kVectors + 3) / 4 * 4;
  for (int i = threadIdx.x; i < 2 * stride * team.count; i += blockDim.x) shared[i] = 0.0f;
  __syncthreads();
  float* chunks = shared + 2 * stride * team.index;
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.count;
  int64_t at = static_cast<int64_t>(blockIdx.x) * team.count + team.index;
  Eight<T> next_x[kVectors], next_residual[kVectors];
  const auto load = [&](int64_t row) {
    load_row(next_x, m.data, row * m.stride, team);
    if constexpr (kAdd)
      load_row(next_residual, p.args.residual, row * p.args.residual_stride, team);
  };
  if (kAhead && at < m.rows) load(at);
  int turn = 0;
  for (; at < m.rows; at += step) {
    if (!kAhead) load(at);
    const int64_t row_start = at * m.cols;
    Eight<T> x[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = next_x[i];
      if (kAdd && team.has(i))
        add_residual(x[i], next_residual[i], p, row_start + team.column(i), 8, true);
    }
    if (kAhead && at + step < m.rows) load(at + step);
    const RowStatistics row =
        statistics_of<kLayerNorm>(x, team, p.inverse_count, p.eps, chunks, stride, turn);
    if (team.warp == 0 && team.lane == 0) store_statistics<kLayerNorm>(row, p, at);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!team.has(i)) continue;
      normalize_eight<T, kLayerNorm>(x[i], row, p, row_start, team.column(i), 8, true);
      if (kVectors > 2) forget(x[i]);  // so that few gammas and betas are loaded ahead
    }
  }
}

// Rows of any length and alignment: a team reads each row once for the mean, once for the mean
// square and once for the result, a segment of chunks at a time.
constexpr int kLongVectors = 2;

template <typename T, bool kLayerNorm, bool kAdd>
__global__ void __launch_bounds__(kNormThreads)
    norm_long_rows(const __grid_constant__ NormParams p) {
  __shared__ alignas(16) float shared[2 * kNormChunks];
  const Matrix& m = p.args.x;
  const Team team(p.warps, m.cols);
  const int segment = team.warps * kLongVectors, stride = (segment + 3) / 4 * 4;
  for (int i = threadIdx.x; i < 2 * stride * team.count; i += blockDim.x) shared[i] = 0.0f;
  __syncthreads();
  float* buffers = shared + 2 * stride * team.index;
  int turn = 0;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * team.count + team.index; at < m.rows;
       at += static_cast<int64_t>(gridDim.x) * team.count) {
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
        float* chunks = buffers + turn * stride;
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
                         return squares_of_eight<kLayerNorm>(x, row.mean, count);
                       }),
                       p.inverse_count, p.eps);
    if (team.warp == 0 && team.lane == 0) store_statistics<kLayerNorm>(row, p, at);
    for (int column = (team.warp * 32 + team.lane) * 8; column < team.cols;
         column += team.warps * kChunk)
      for_eight(column, [&](const Eight<T>& x, int count) {
        normalize_eight<T, kLayerNorm>(x, row, p, row_start, column, count, p.vectors);
      });
  }
}

}  // namespace fp8core
