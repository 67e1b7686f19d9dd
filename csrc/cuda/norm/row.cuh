// A row, held by a team of warps: each lane has kVectors times eight adjacent elements.
//
// Warp w of a team of `warps` holds the chunks w, w + warps, w + 2 warps ... (statistics.cuh has
// what a chunk is). A block has one or more teams, each of which works on rows of its own and waits
// for its own warps alone.
#pragma once

#include "../quantize/vectors.h"
#include "statistics.cuh"

namespace fp8core {

// A block of threads is [32 * warps of a team, teams]: this is a thread's number in it, and how
// many there are.
__device__ inline int thread_of_block() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ inline int threads_of_block() { return blockDim.x * blockDim.y; }

struct Team {
  int warp = threadIdx.x / 32, warps = blockDim.x / 32;  // within the team
  int lane = threadIdx.x % 32;
  int cols;

  __device__ explicit Team(int64_t cols) : cols(static_cast<int>(cols)) {}

  // The rows of the block's teams lie one behind the other, and so do those of blocks.
  __device__ int64_t first_row() const {
    return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  }
  // From a team's row to the next, where blocks stay.
  __device__ static int64_t row_step() { return static_cast<int64_t>(gridDim.x) * blockDim.y; }

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
      wait_at_barrier(threadIdx.y + 1, blockDim.x);
  }

  __device__ static void wait_at_barrier(unsigned barrier, unsigned threads) {
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

// The vectors of a held row: zero behind its end.
template <typename T, int kVectors>
__device__ void load_row(Eight<T> (&x)[kVectors], const void* data, int64_t offset,
                         const Team& team) {
  const T* row = static_cast<const T*>(data) + offset;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (team.has(i))
      x[i].load_kept(row + team.column(i));
    else
      clear(x[i]);
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

// A bfloat16 is the upper half of a float: an instruction each.
template <typename T>
__device__ void unpack(float (&values)[8], const Eight<T>& x) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      values[i] = __uint_as_float(i % 2 == 0 ? x.word(i / 2) << 16 : x.word(i / 2) & 0xFFFF0000u);
    else
      values[i] = x[i];
  }
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

// To global memory. What is stored is not read again soon, if by anyone.
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

// To shared or to global memory.
__device__ inline void store_floats(float* to, const float (&values)[8]) {
  auto* vectors = reinterpret_cast<float4*>(to);
  vectors[0] = make_float4(values[0], values[1], values[2], values[3]);
  vectors[1] = make_float4(values[4], values[5], values[6], values[7]);
}

template <typename T>
__device__ void round_and_store(void* data, int64_t at, const float (&values)[8], int count,
                                bool vectors) {
  store_eight(static_cast<T*>(data) + at, rounded<T>(values), count, vectors);
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

  __device__ void center(float (&gamma)[8]) const {
    if (!zero_centered) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) gamma[i] = __fadd_rn(gamma[i], 1.0f);
  }
  // Without a bias -0, to which nothing is equal but itself: adding it changes no value.
  __device__ static void set_absent(float (&beta)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) beta[i] = -0.0f;
  }

  __device__ void read_gamma(float (&gamma)[8], int at, int count, bool vectors) const {
    read_values(gamma, weight.data, weight.type, at, count, vectors);
    center(gamma);
  }
  __device__ void read_beta(float (&beta)[8], int at, int count, bool vectors) const {
    if (bias.data != nullptr)
      read_values(beta, bias.data, bias.type, at, count, vectors);
    else
      set_absent(beta);
  }

  // The same of a whole vector of type T.
  template <typename T>
  __device__ void read_gamma_as(float (&gamma)[8], int at) const {
    read_values<T>(gamma, weight.data, at, 8, true);
    center(gamma);
  }
  template <typename T>
  __device__ void read_beta_as(float (&beta)[8], int at) const {
    if (bias.data != nullptr)
      read_values<T>(beta, bias.data, at, 8, true);
    else
      set_absent(beta);
  }
};

// Sums over a row, of which each lane gives its shares: kVectors for each. All of the team get
// them. `chunks` [kSums, stride] is not in use: kernels take turns between two.
template <int kSums, int kVectors>
__device__ void row_sums(float (&sums)[kSums], const float (&lane_sums)[kSums * kVectors],
                         float* chunks, int stride, const Team& team) {
  constexpr int kLanes = 32 / (kSums * kVectors);  // that know the sum of one chunk
  const float of_chunk = sum_over_lanes(lane_sums);
  const int share = team.lane / kLanes, chunk = share % kVectors * team.warps + team.warp;
  const int count = team.chunks();
  if (team.lane % kLanes == 0 && chunk < count)
    chunks[share / kVectors * stride + chunk] = of_chunk;
  team.wait();
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = sum_of_chunks(chunks + i * stride, count);
}

template <int kVectors>
__device__ float row_sum(const float (&lane_sums)[kVectors], float* chunks, const Team& team) {
  float sum[1];
  row_sums<1, kVectors>(sum, lane_sums, chunks, 0, team);
  return sum[0];
}

// The share of eight deviations in a sum of squares.
__device__ inline float squares_of_eight(const float (&deviations)[8]) {
  const auto at = [&](int j) { return deviations[j]; };
  return dot_of_eight(at, at);
}

// Of eight elements, behind the row 0: their deviations from the mean, 0 behind the row.
template <bool kLayerNorm, typename T>
__device__ void deviate(float (&deviations)[8], const Eight<T>& x, float mean, int count) {
  unpack(deviations, x);
  if constexpr (kLayerNorm) {
#pragma unroll
    for (int j = 0; j < 8; ++j) deviations[j] = j < count ? __fsub_rn(deviations[j], mean) : 0.0f;
  }
}

// The statistics of a held row, of which a LayerNorm subtracts the mean. `chunks` are two buffers
// of row_sum, `stride` floats apart: a LayerNorm takes both; an RMSNorm takes that of `turn`, and
// if it works on several rows, the two in turn.
template <bool kLayerNorm, int kVectors>
__device__ RowStatistics statistics_of(float (&x)[kVectors][8], const Team& team,
                                       float inverse_count, float eps, float* chunks, int stride,
                                       int turn = 1) {
  RowStatistics row;
  float lane_sums[kVectors];
  if constexpr (kLayerNorm) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) lane_sums[i] = sum_of_eight([&](int j) { return x[i][j]; });
    row.mean = __fmul_rn(row_sum(lane_sums, chunks, team), inverse_count);
    turn = 1;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = __fsub_rn(x[i][j], row.mean);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    lane_sums[i] = kLayerNorm && !team.has(i) ? 0.0f : squares_of_eight(x[i]);
  row.rstd = rstd_of(row_sum(lane_sums, chunks + turn * stride, team), inverse_count, eps);
  return row;
}

}  // namespace fp8core
