// The first of two passes over x, for casts whose scales follow from amaxes that lie beyond a
// block's reach: the statistics of rows, and the amaxes of y. The second computes y again.
#pragma once

#include "../quantize/amax.cuh"
#include "row.cuh"

namespace fp8core {

struct FirstPassParams {
  Matrix x;
  Affine affine;
  float *mean, *rstd;
  float inverse_count, eps;
  float* amaxes;  // kTensor: [blocks]; kRow: [rows + cols], zero before; kDelayed, kVec128: null
};

constexpr int kFirstPassThreads = 512;  // at most

// The larger magnitudes of two pairs of T, NaN left out.
template <typename T>
__device__ uint32_t larger_pair(uint32_t one, uint32_t other) {
  using Pair = typename Largest<T>::Pair;
  const Pair larger = __hmax2(__habs2(*reinterpret_cast<const Pair*>(&one)),
                              __habs2(*reinterpret_cast<const Pair*>(&other)));
  return *reinterpret_cast<const uint32_t*>(&larger);
}

// Those of eight elements, pair by pair, or of all of them.
template <typename T>
__device__ void take_maxima(Eight<T>& maxima, const Eight<T>& y) {
  maxima.bits.x = larger_pair<T>(maxima.bits.x, y.bits.x);
  maxima.bits.y = larger_pair<T>(maxima.bits.y, y.bits.y);
  maxima.bits.z = larger_pair<T>(maxima.bits.z, y.bits.z);
  maxima.bits.w = larger_pair<T>(maxima.bits.w, y.bits.w);
}

template <typename T>
__device__ uint32_t take_largest(uint32_t largest, const Eight<T>& y) {
  const uint32_t first = larger_pair<T>(y.bits.x, y.bits.y);
  return larger_pair<T>(larger_pair<T>(largest, first), larger_pair<T>(y.bits.z, y.bits.w));
}

// Blocks of kFirstPassThreads threads on a multiprocessor, which is what limits registers.
template <int kVectors, bool kLayerNorm, Granularity G>
constexpr int first_pass_blocks = G == Granularity::kRow         ? 4 / kVectors
                                  : kVectors == 2 && !kLayerNorm ? 3
                                                                 : 2;

template <typename T, int kVectors, bool kLayerNorm, Granularity G>
__global__ void __launch_bounds__(kFirstPassThreads, first_pass_blocks<kVectors, kLayerNorm, G>)
    norm_first_pass(const __grid_constant__ FirstPassParams p) {
  constexpr bool kOfTensor = G == Granularity::kTensor, kOfRows = G == Granularity::kRow;
  __shared__ float shared[2 * kFirstPassThreads / 32 * kVectors];
  __shared__ float block_amax[kFirstPassThreads / 32];
  const Matrix& m = p.x;
  const Team team(m.cols);
  const int stride = team.warps * kVectors;
  float* chunks = shared + 2 * stride * threadIdx.y;
  Eight<T> maxima[kOfRows ? kVectors : 1];  // of columns
#pragma unroll
  for (auto& eight : maxima) clear(eight);
  uint32_t largest_pair = 0;  // of the tensor
  int turn = 0;
  const int64_t step = team.row_step();
  Eight<T> next[kVectors];  // the row after, which is on its way meanwhile
  if (team.first_row() < m.rows) load_row(next, m.data, team.first_row() * m.stride, team);
  for (int64_t at = team.first_row(); at < m.rows; at += step, turn ^= 1) {
    float x[kVectors][8];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) unpack(x[i], next[i]);
    if (at + step < m.rows) load_row(next, m.data, (at + step) * m.stride, team);
    const RowStatistics row =
        statistics_of<kLayerNorm>(x, team, p.inverse_count, p.eps, chunks, stride, turn);
    if (team.warp == 0 && team.lane == 0) {
      if constexpr (kLayerNorm) p.mean[at] = row.mean;
      p.rstd[at] = row.rstd;
    }
    if constexpr (kOfTensor || kOfRows) {
      float row_amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!team.has(i)) continue;
        float gamma[8], beta[8], exact[8];
        p.affine.read_gamma(gamma, team.column(i), 8, true);
        if constexpr (kLayerNorm) p.affine.read_beta(beta, team.column(i), 8, true);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          exact[j] = scaled<kLayerNorm>(__fmul_rn(x[i][j], row.rstd), gamma[j],
                                        kLayerNorm ? beta[j] : 0.0f);
        const Eight<T> y = rounded<T>(exact);
        if constexpr (kOfTensor) largest_pair = take_largest(largest_pair, y);
        if constexpr (kOfRows) {
          take_maxima(maxima[i], y);
          row_amax = fmaxf(row_amax, y.amax());
        }
      }
      if constexpr (kOfRows) {
        row_amax = warp_max(row_amax);
        if (team.lane == 0) atomic_amax(p.amaxes + at, row_amax);
      }
    }
  }
  if constexpr (kOfTensor) {
    const auto both = *reinterpret_cast<const typename Largest<T>::Pair*>(&largest_pair);
    float largest = warp_max(fmaxf(static_cast<float>(both.x), static_cast<float>(both.y)));
    if (team.lane == 0) block_amax[thread_of_block() / 32] = largest;
    __syncthreads();
    if (thread_of_block() != 0) return;
    for (int warp = 1; warp < threads_of_block() / 32; ++warp)
      largest = fmaxf(largest, block_amax[warp]);
    p.amaxes[blockIdx.x] = largest;
  }
  if constexpr (kOfRows) {
    __shared__ alignas(16) uint4 of_teams[kFirstPassThreads * kVectors];
    const int width = team.warps * kVectors * kChunk;  // columns that a team has
    auto* eights = reinterpret_cast<Eight<T>*>(of_teams) + threadIdx.y * (width / 8);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) eights[team.column(i) / 8] = maxima[i];
    __syncthreads();
    const auto* pairs = reinterpret_cast<const uint32_t*>(of_teams);
    for (int pair = thread_of_block(); pair < team.cols / 2; pair += threads_of_block()) {
      uint32_t largest = pairs[pair];
      for (int other = 1; other < static_cast<int>(blockDim.y); ++other)
        largest = larger_pair<T>(largest, pairs[other * (width / 2) + pair]);
      const auto both = *reinterpret_cast<const typename Largest<T>::Pair*>(&largest);
      float* to = p.amaxes + m.rows + 2 * pair;
      atomic_amax(to, static_cast<float>(both.x));
      atomic_amax(to + 1, static_cast<float>(both.y));
    }
  }
}

}  // namespace fp8core
