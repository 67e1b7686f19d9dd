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

// The sum over the lanes of a warp, known to all of them.
__device__ inline float chunk_sum(float lane_sum) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    lane_sum = __fadd_rn(lane_sum, __shfl_xor_sync(0xFFFFFFFFu, lane_sum, lanes));
  return lane_sum;
}

// Four running sums of chunks; the zeros behind the last chunk, up to a multiple of four, add
// nothing.
struct RunningSums {
  float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ void add(const float4& chunks) {
    sums.x = __fadd_rn(sums.x, chunks.x);
    sums.y = __fadd_rn(sums.y, chunks.y);
    sums.z = __fadd_rn(sums.z, chunks.z);
    sums.w = __fadd_rn(sums.w, chunks.w);
  }
  // `chunks` is aligned to 16 bytes and zero from `count` to the next multiple of four.
  __device__ void add(const float* chunks, int count) {
    for (int i = 0; i < count; i += 4) add(*reinterpret_cast<const float4*>(chunks + i));
  }
  __device__ float total() const {
    return __fadd_rn(__fadd_rn(sums.x, sums.y), __fadd_rn(sums.z, sums.w));
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
__device__ float normalized(float x, const RowStatistics& row, float gamma, float beta) {
  const float z = standardized<kLayerNorm>(x, row);
  return kLayerNorm ? __fmaf_rn(z, gamma, beta) : __fmul_rn(z, gamma);
}

// What a sum is multiplied by to be a mean.
inline float inverse_of(int64_t count) { return 1.0f / static_cast<float>(count); }

}  // namespace fp8core
