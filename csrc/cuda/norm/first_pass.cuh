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
  int warps;      // of a team
  float* amaxes;  // kTensor: [blocks]; kRow: [rows + cols], zero before; kDelayed, kVec128: null
};

constexpr int kFirstPassThreads = 512;  // at most

template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// The larger magnitudes of two pairs of T, NaN left out.
template <typename T>
__device__ uint32_t larger_pair(uint32_t one, uint32_t other) {
  using Pair = PairOf<T>;
  const Pair larger = __hmax2(__habs2(*reinterpret_cast<const Pair*>(&one)),
                              __habs2(*reinterpret_cast<const Pair*>(&other)));
  return *reinterpret_cast<const uint32_t*>(&larger);
}

template <typename T>
__device__ void take_maxima(Eight<T>& maxima, const Eight<T>& y) {
  maxima.bits.x = larger_pair<T>(maxima.bits.x, y.bits.x);
  maxima.bits.y = larger_pair<T>(maxima.bits.y, y.bits.y);
  maxima.bits.z = larger_pair<T>(maxima.bits.z, y.bits.z);
  maxima.bits.w = larger_pair<T>(maxima.bits.w, y.bits.w);
}

template <typename T, int kVectors, bool kLayerNorm, Granularity G>
__global__ void __launch_bounds__(kFirstPassThreads, kVectors == 2 ? 2 : 1)
    norm_first_pass(const __grid_constant__ FirstPassParams p) {
  constexpr bool kAhead = kVectors * (kLayerNorm ? 2 : 1) <= 4;
  constexpr bool kOfTensor = G == Granularity::kTensor, kOfRows = G == Granularity::kRow;
  __shared__ alignas(16) float shared[4 * kFirstPassThreads / 32 * kVectors];
  __shared__ float block_amax[kFirstPassThreads / 32];
  const Matrix& m = p.x;
  const Team team(p.warps, m.cols);
  const int stride = (team.warps * kVectors + 3) / 4 * 4;
  for (int i = threadIdx.x; i < 2 * stride * team.count; i += blockDim.x) shared[i] = 0.0f;
  __syncthreads();
  float* chunks = shared + 2 * stride * team.index;
  const int64_t step = static_cast<int64_t>(gridDim.x) * team.count;
  int64_t at = static_cast<int64_t>(blockIdx.x) * team.count + team.index;
  Eight<T> next[kVectors];
  if (kAhead && at < m.rows) load_row</*kAgain=*/true>(next, m.data, at * m.stride, team);
  Eight<T> maxima[kVectors];  // of columns
#pragma unroll
  for (int i = 0; i < kVectors; ++i) clear(maxima[i]);
  int turn = 0;
  for (; at < m.rows; at += step) {
    if (!kAhead) load_row</*kAgain=*/true>(next, m.data, at * m.stride, team);
    Eight<T> x[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = next[i];
    if (kAhead && at + step < m.rows)
      load_row</*kAgain=*/true>(next, m.data, (at + step) * m.stride, team);
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
          exact[j] = normalized<kLayerNorm>(x[i][j], row, gamma[j], kLayerNorm ? beta[j] : 0.0f);
        const Eight<T> y = rounded<T>(exact);
        take_maxima(maxima[i], y);
        if constexpr (kOfRows) row_amax = fmaxf(row_amax, y.amax());
        forget(x[i]);  // so that few gammas and betas are loaded ahead
      }
      if constexpr (kOfRows) {
        row_amax = warp_max(row_amax);
        if (team.lane == 0) atomic_amax(p.amaxes + at, row_amax);
      }
    }
  }
  if constexpr (kOfTensor) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) largest = fmaxf(largest, maxima[i].amax());
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) block_amax[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < blockDim.x / 32; ++warp) largest = fmaxf(largest, block_amax[warp]);
    p.amaxes[blockIdx.x] = largest;
  }
  if constexpr (kOfRows) {
    __shared__ alignas(16) uint4 of_teams[kFirstPassThreads * kVectors];
    const int width = team.warps * kVectors * kChunk;  // columns that a team has
    auto* eights = reinterpret_cast<Eight<T>*>(of_teams) + team.index * (width / 8);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) eights[team.column(i) / 8] = maxima[i];
    __syncthreads();
    const auto* pairs = reinterpret_cast<const uint32_t*>(of_teams);
    for (int pair = threadIdx.x; pair < team.cols / 2; pair += blockDim.x) {
      uint32_t largest = pairs[pair];
      for (int other = 1; other < team.count; ++other)
        largest = larger_pair<T>(largest, pairs[other * (width / 2) + pair]);
      const auto both = *reinterpret_cast<const PairOf<T>*>(&largest);
      float* to = p.amaxes + m.rows + 2 * pair;
      atomic_amax(to, static_cast<float>(both.x));
      atomic_amax(to + 1, static_cast<float>(both.y));
    }
  }
}

}  // namespace fp8core
