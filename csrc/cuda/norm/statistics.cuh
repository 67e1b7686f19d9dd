// The statistics of a row and the normalized value, one way for all kernels, so that the bits of a
// row depend on neither the kernel nor the threads that share it. A sum over a row [n] adds up
//
//     8 adjacent elements, the first to the last             (one lane)
//     32 lanes, a chunk of 256 columns: by halves, 16 to 1   (one warp)
//     the chunks: chunk c in the running sum c % 4 of four, then (0 + 1) + (2 + 3)
//
// Elements beyond the row count as 0. Sums and products are written out as intrinsics where the
// compiler could contract them in one kernel and not in another.
#pragma once

#include "../quantize/numerics.cuh"
#include "fp8core/norm.h"

namespace fp8core {

constexpr int kChunk = 256;

inline int num_chunks(int64_t cols) { return static_cast<int>((cols + kChunk - 1) / kChunk); }

template <typename ValueAt>
__device__ float sum_of_eight(const ValueAt& value) {
  float sum = value(0);
#pragma unroll
  for (int i = 1; i < 8; ++i) sum = __fadd_rn(sum, value(i));
  return sum;
}

template <typename ValueAt, typename OtherAt>
__device__ float dot_of_eight(const ValueAt& value, const OtherAt& other) {
  float sum = __fmul_rn(value(0), other(0));
#pragma unroll
  for (int i = 1; i < 8; ++i) sum = __fmaf_rn(value(i), other(i), sum);
  return sum;
}

// Sums over the lanes of a warp, of kCount (1, 2 or 4) values each: lane l gets that of value
// l / (32 / kCount). Of the values that two lanes have, each keeps half and hands on the other
// half, so that kCount sums take little longer than one.
template <int kCount>
__device__ float sum_over_lanes(const float (&values)[kCount]) {
  const int lane = threadIdx.x % 32;
  float kept[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) kept[i] = values[i];
  int lanes = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, lanes /= 2) {
    const bool keeps_upper = (lane & lanes) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = keeps_upper ? kept[i + half] : kept[i];
      const float handed = keeps_upper ? kept[i] : kept[i + half];
      kept[i] = __fadd_rn(mine, __shfl_xor_sync(0xFFFFFFFFu, handed, lanes));
    }
  }
#pragma unroll
  for (int rest = 16 / kCount; rest > 0; rest /= 2)
    kept[0] = __fadd_rn(kept[0], __shfl_xor_sync(0xFFFFFFFFu, kept[0], rest));
  return kept[0];
}

// The same of one value: every lane has its sum.
__device__ inline float chunk_sum(float value) {
  const float values[1] = {value};
  return sum_over_lanes(values);
}

// The sum of chunks, known to all lanes of a warp. Lane l adds up the running sum l % 4.
__device__ inline float sum_of_chunks(const float* chunks, int count) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x % 4; i < count; i += 4) sum = __fadd_rn(sum, chunks[i]);
  sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 2));
}

// The four running sums of chunks that come some at a time, a multiple of four each time but for
// the last.
struct RunningSums {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ void add(const float* chunks, int count) {
    for (int i = 0; i < count; i += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < count) sums[j] = __fadd_rn(sums[j], chunks[i + j]);
    }
  }
  __device__ float total() const {
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
  }
};

struct RowStatistics {
  float mean = 0.0f, rstd = 0.0f;
};

__device__ inline float rstd_of(float squares, float inverse_count, float eps) {
  return __frsqrt_rn(__fmaf_rn(squares, inverse_count, eps));
}

// (x - mean) * rstd; an RMSNorm has no mean.
template <bool kLayerNorm>
__device__ float standardized(float x, const RowStatistics& row) {
  return __fmul_rn(kLayerNorm ? __fsub_rn(x, row.mean) : x, row.rstd);
}

template <bool kLayerNorm>
__device__ float scaled(float z, float gamma, float beta) {
  return kLayerNorm ? __fmaf_rn(z, gamma, beta) : __fmul_rn(z, gamma);
}

template <bool kLayerNorm>
__device__ float normalized(float x, const RowStatistics& row, float gamma, float beta) {
  return scaled<kLayerNorm>(standardized<kLayerNorm>(x, row), gamma, beta);
}

// What a sum is multiplied by to be a mean.
inline float inverse_of(int64_t count) { return 1.0f / static_cast<float>(count); }

}  // namespace fp8core
