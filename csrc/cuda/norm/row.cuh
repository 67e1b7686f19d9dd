// A row, held by a team of warps: each lane has kVectors times eight adjacent elements.
//
// Warp w of a team of `warps` holds the chunks w, w + warps, w + 2 warps ... (statistics.cuh has
// what a chunk is). A block has one or more teams, each of which works on rows of its own and waits
// for its own warps alone.
#pragma once

#include "../quantize/vectors.h"
#include "statistics.cuh"

namespace fp8core {

struct Team {
  int index, count;  // of the block's teams
  int warp, warps;   // within the team
  int lane;
  int cols;

  __device__ Team(int warps, int64_t cols)
      : index(threadIdx.x / 32 / warps),
        count(blockDim.x / 32 / warps),
        warp(threadIdx.x / 32 % warps),
        warps(warps),
        lane(threadIdx.x % 32),
        cols(static_cast<int>(cols)) {}

  // The first of the lane's columns in its vector `i`. A held row has a multiple of eight columns,
  // so that a vector is in the row or behind it.
  __device__ int column(int i) const { return (i * warps + warp) * kChunk + lane * 8; }
  __device__ bool has(int i) const { return column(i) < cols; }
  __device__ int chunks() const { return (cols + kChunk - 1) / kChunk; }

  // Waits for the warps of the team. Barrier 0 is that of the whole block.
  __device__ void wait() const {
    if (warps == 1)
      __syncwarp();
    else
      wait_at_barrier(index + 1, warps * 32);
  }

  __device__ static void wait_at_barrier(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }
};

// Of eight elements, kernels are told how many columns are left from the first of them on: `count`
// may be more than 8, or negative where all of them lie behind the row. It is not clamped: ptxas of
// CUDA 13.0 takes a negative number for 8 where a number clamped to 0 and 8 is compared with 8.

// The elements that are in memory, the others 0.
template <typename T>
__device__ void load_eight(Eight<T>& x, const T* from, int count, bool vectors) {
  if (vectors && count >= 8)
    x.load(from);
  else
    x.gather(from, count);
}

template <typename T>
__device__ void clear(Eight<T>& x) {
  x.gather(nullptr, 0);
}

// A held row: zero behind its end. `kAgain`: it is read again soon, and stays in the caches.
template <bool kAgain = false, typename T, int kVectors>
__device__ void load_row(Eight<T> (&x)[kVectors], const void* data, int64_t offset,
                         const Team& team) {
  const T* row = static_cast<const T*>(data) + offset;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!team.has(i))
      clear(x[i]);
    else if constexpr (kAgain)
      x[i].load_kept(row + team.column(i));
    else
      x[i].load_in_order(row + team.column(i));
  }
}

// What was computed from x before is computed again where it is used later, instead of being kept
// in registers: to the compiler these are other bits.
__device__ inline void forget(Eight<float>& x) {
  asm volatile(""
               : "+f"(x.low.x), "+f"(x.low.y), "+f"(x.low.z), "+f"(x.low.w), "+f"(x.high.x),
                 "+f"(x.high.y), "+f"(x.high.z), "+f"(x.high.w)
               :
               : "memory");
}
template <typename T>
__device__ void forget(Eight<T>& x) {
  asm volatile("" : "+r"(x.bits.x), "+r"(x.bits.y), "+r"(x.bits.z), "+r"(x.bits.w) : : "memory");
}

// The bits of element i.
template <typename T>
__device__ T element_of(const Eight<T>& x, int i) {
  if constexpr (std::is_same_v<T, float>) {
    return x[i];
  } else {
    const auto pair = x.pair(i / 2);
    return i % 2 == 0 ? pair.x : pair.y;
  }
}

template <typename T>
__device__ void store_eight(T* to, const Eight<T>& x, int count, bool vectors) {
  if (vectors && count >= 8) {
    x.store(to);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) to[i] = element_of(x, i);
}

template <typename T>
__device__ void round_and_store(void* data, int64_t at, const float (&values)[8], int count,
                                bool vectors) {
  store_eight(static_cast<T*>(data) + at, rounded<T>(values), count, vectors);
}

// Eight values to shared memory; `to` is aligned to 16 bytes. The stores above go to global memory
// alone.
__device__ inline void park_eight(float* to, const float (&values)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// Rounds eight values to `type` and stores those that are in the row.
__device__ inline void store_values(void* data, InputType type, int64_t at,
                                    const float (&values)[8], int count, bool vectors) {
  if (type == InputType::kBFloat16)
    round_and_store<__nv_bfloat16>(data, at, values, count, vectors);
  else if (type == InputType::kFloat16)
    round_and_store<__half>(data, at, values, count, vectors);
  else
    round_and_store<float>(data, at, values, count, vectors);
}

template <typename T>
__device__ void read_values(float (&values)[8], const void* data, int64_t at, int count,
                            bool vectors) {
  Eight<T> x;
  const T* from = static_cast<const T*>(data) + at;
  if (vectors && count >= 8)
    x.load_kept(from);
  else
    x.gather(from, count);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = x[i];
}

// Eight values of `type` from `at` on, those that are in memory, the others 0.
__device__ inline void read_values(float (&values)[8], const void* data, InputType type, int64_t at,
                                   int count, bool vectors) {
  if (type == InputType::kBFloat16)
    read_values<__nv_bfloat16>(values, data, at, count, vectors);
  else if (type == InputType::kFloat16)
    read_values<__half>(values, data, at, count, vectors);
  else
    read_values<float>(values, data, at, count, vectors);
}

__device__ inline void round_values(float (&values)[8], InputType type) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (type == InputType::kBFloat16) values[i] = __bfloat162float(__float2bfloat16_rn(values[i]));
    if (type == InputType::kFloat16) values[i] = __half2float(__float2half_rn(values[i]));
  }
}

struct Affine {
  Parameters weight, bias;
  bool zero_centered = false;

  __device__ void read_gamma(float (&gamma)[8], int at, int count, bool vectors) const {
    read_values(gamma, weight.data, weight.type, at, count, vectors);
    if (!zero_centered) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) gamma[i] = __fadd_rn(gamma[i], 1.0f);
  }
  // Without a bias -0, to which nothing is equal but itself: adding it changes no value.
  __device__ void read_beta(float (&beta)[8], int at, int count, bool vectors) const {
    if (bias.data != nullptr) {
      read_values(beta, bias.data, bias.type, at, count, vectors);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) beta[i] = -0.0f;
  }
};

// The sum over a row of which each lane gives its share in `lane_sums`, known to the team.
// `chunks` [as many as the row has, up to a multiple of four] is zero behind the last of them, and
// not in use: kernels take turns between two.
template <int kVectors>
__device__ float row_sum(const float (&lane_sums)[kVectors], float* chunks, const Team& team) {
  float sums[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sums[i] = chunk_sum(lane_sums[i]);
  const int count = team.chunks();
  if (team.lane == 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (i * team.warps + team.warp < count) chunks[i * team.warps + team.warp] = sums[i];
  }
  team.wait();
  RunningSums running;
  running.add(chunks, count);
  return running.total();
}

// The share of eight elements in the sum of squares.
template <bool kLayerNorm, typename T>
__device__ float squares_of_eight(const Eight<T>& x, float mean, int count) {
  const auto deviation = [&](int j) {
    if constexpr (kLayerNorm)
      return j < count ? __fsub_rn(x[j], mean) : 0.0f;
    else
      return x[j];
  };
  return dot_of_eight(deviation, deviation);
}

// The statistics of a held row; `chunks` are two buffers of row_sum, `turn` says which one comes
// next.
template <bool kLayerNorm, typename T, int kVectors>
__device__ RowStatistics statistics_of(Eight<T> (&x)[kVectors], const Team& team,
                                       float inverse_count, float eps, float* chunks, int stride,
                                       int& turn) {
  RowStatistics row;
  float lane_sums[kVectors];
  if constexpr (kLayerNorm) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      lane_sums[i] = sum_of_eight([&](int j) { return x[i][j]; });
      forget(x[i]);
    }
    row.mean = __fmul_rn(row_sum(lane_sums, chunks + turn * stride, team), inverse_count);
    turn ^= 1;
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    lane_sums[i] = squares_of_eight<kLayerNorm>(x[i], row.mean, team.has(i) ? 8 : 0);
    forget(x[i]);
  }
  row.rstd = rstd_of(row_sum(lane_sums, chunks + turn * stride, team), inverse_count, eps);
  turn ^= 1;
  return row;
}

}  // namespace fp8core
