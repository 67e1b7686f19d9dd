// The elements that a thread of the NVFP4 kernels holds, 16 rows x 4 columns, and their Hadamard
// transform.
#pragma once

#include <type_traits>

#include "amax.cuh"
#include "nvfp4_params.h"

namespace fp8core {

constexpr int kFp4Threads = 256;

// 16 rows of 4 adjacent elements.
template <typename T>
struct Strip {
  static constexpr int kWords = 32;
  uint2 bits[16];
  __device__ uint32_t word(int i) const { return i % 2 == 0 ? bits[i / 2].x : bits[i / 2].y; }
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

  __device__ Pair pair(int row, int half) const {
    return *reinterpret_cast<const Pair*>(half == 0 ? &bits[row].x : &bits[row].y);
  }
  __device__ float at(int row, int column) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float
      const uint32_t word = column < 2 ? bits[row].x : bits[row].y;
      return __uint_as_float(column % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
    } else {
      const Pair both = pair(row, column / 2);
      return static_cast<float>(column % 2 == 0 ? both.x : both.y);
    }
  }
  __device__ void load(int row, const T* from) {
    bits[row] = __ldcs(reinterpret_cast<const uint2*>(from));
  }
  __device__ void gather(int row, const T* from, int count) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = j < count ? reinterpret_cast<const uint16_t*>(from)[j] : 0;
    bits[row] = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
  }
  // The larger of columns 0 and 2 in the low half, of columns 1 and 3 in the high half.
  __device__ uint32_t row_maxima(int row) const {
    const Pair maxima = __hmax2(__habs2(pair(row, 0)), __habs2(pair(row, 1)));
    return *reinterpret_cast<const uint32_t*>(&maxima);
  }
  __device__ void column_amax(float (&maxima)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Pair both = __habs2(pair(0, half));
#pragma unroll
      for (int row = 1; row < 16; ++row) both = __hmax2(both, __habs2(pair(row, half)));
      maxima[2 * half] = fmaxf(0.0f, static_cast<float>(both.x));
      maxima[2 * half + 1] = fmaxf(0.0f, static_cast<float>(both.y));
    }
  }
};

template <>
struct Strip<float> {
  static constexpr int kWords = 64;
  float4 values[16];
  __device__ uint32_t word(int i) const { return __float_as_uint(at(i / 4, i % 4)); }

  __device__ float at(int row, int column) const {
    const float4& v = values[row];
    return column == 0 ? v.x : column == 1 ? v.y : column == 2 ? v.z : v.w;
  }
  __device__ void load(int row, const float* from) {
    values[row] = __ldcs(reinterpret_cast<const float4*>(from));
  }
  __device__ void gather(int row, const float* from, int count) {
    values[row] = make_float4(count > 0 ? from[0] : 0.0f, count > 1 ? from[1] : 0.0f,
                              count > 2 ? from[2] : 0.0f, count > 3 ? from[3] : 0.0f);
  }
  __device__ float row_amax(int row) const {
    const float4& v = values[row];
    float largest = fmaxf(fmaxf(0.0f, fabsf(v.x)), fabsf(v.y));  // fmaxf drops NaN
    return fmaxf(fmaxf(largest, fabsf(v.z)), fabsf(v.w));
  }
  __device__ void column_amax(float (&maxima)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      maxima[j] = 0.0f;
#pragma unroll
      for (int row = 0; row < 16; ++row) maxima[j] = fmaxf(maxima[j], fabsf(at(row, j)));
    }
  }
};

template <typename T>
__device__ float strip_amax(const Strip<T>& x) {
  float maxima[4];
  x.column_amax(maxima);
  return fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
}

// Where a thread's strip begins.
struct StripOrigin {
  int64_t row, column;
  int lane, warp;
  __device__ StripOrigin(unsigned tile, int tile_columns)
      : row(static_cast<int64_t>(tile / tile_columns) * kTile),
        column(static_cast<int64_t>(tile % tile_columns) * kTile),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32) {
    row += warp * 16;
    column += lane * 4;
  }
};

// Where strips come from: a matrix in memory. Others have the same members.
template <typename T>
struct MatrixStrips {
  using Value = T;
  struct Inputs {
    static constexpr float* tile_sums = nullptr;  // where the sums of each tile's columns go
  };
  // Blocks of threads that a multiprocessor runs at a time. The grid has no more; they share the
  // tiles.
  static constexpr int kBlocks = sizeof(T) == 2 ? 3 : 2;

  static __device__ void load(Strip<T>& x, const Nvfp4Params& p, const Inputs&,
                              const StripOrigin& at) {
    const Matrix& m = p.x;
    const T* from = static_cast<const T*>(m.data) + at.row * m.stride + at.column;
    if (p.vector_loads && at.column < m.cols && at.row + 16 <= m.rows) {
#pragma unroll
      for (int i = 0; i < 16; ++i) x.load(i, from + i * m.stride);
      return;
    }
    const int count = static_cast<int>(max(int64_t{0}, min(int64_t{4}, m.cols - at.column)));
#pragma unroll
    for (int i = 0; i < 16; ++i) x.gather(i, from + i * m.stride, at.row + i < m.rows ? count : 0);
  }
};

__device__ inline float in_bfloat16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// 16 elements times diag(signs) H / 4, before the rounding to bfloat16. Two are added at a time, in
// the order of fp8core.backend_api.hadamard16. Elements are divided by 16 first, which is exact
// even where the quotient is subnormal: a sum that is finite in the end then never overflows on the
// way.
__device__ inline void hadamard(float (&v)[16]) {
  // + + + - + - - - - - - + - + - -, the lowest bit first
  constexpr uint32_t kMinus = 0b1101'0111'1110'1000;
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] *= kMinus >> i & 1 ? -0.0625f : 0.0625f;
#pragma unroll
  for (int half = 1; half < 16; half *= 2) {
#pragma unroll
    for (int first = 0; first < 16; ++first) {
      if (first & half) continue;
      const float one = v[first], other = v[first | half];
      v[first] = one + other;
      v[first | half] = one - other;
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] *= 4.0f;
}

template <typename T>
__device__ Strip<__nv_bfloat16> transformed(const Strip<T>& x) {
  Strip<__nv_bfloat16> result;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float even[16], odd[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      even[i] = x.at(i, 2 * half);
      odd[i] = x.at(i, 2 * half + 1);
      if (!std::is_same_v<T, __nv_bfloat16>) {
        even[i] = in_bfloat16(even[i]);
        odd[i] = in_bfloat16(odd[i]);
      }
    }
    hadamard(even);
    hadamard(odd);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(even[i], odd[i]);
      (half == 0 ? result.bits[i].x : result.bits[i].y) = *reinterpret_cast<const uint32_t*>(&both);
    }
  }
  return result;
}

}  // namespace fp8core
