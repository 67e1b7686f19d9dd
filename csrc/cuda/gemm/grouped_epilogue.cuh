// From sums in registers to d: scales, bias, the sum that is already there, one rounding, stores of
// 32 adjacent bytes by every four threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "grouped_params.h"

namespace fp8core::sm90 {

struct TileOut {
  int row, rows, column;  // rows: those in the group, may be more than the tile's
  int group, entry;
  bool is_tail;   // rows of no group: zeros
  bool is_empty;  // nothing was summed up
};

__device__ inline float read(const void* values, ElementType type, int at) {
  switch (type) {
    case ElementType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[at]);
    case ElementType::kFloat16: return __half2float(static_cast<const __half*>(values)[at]);
    default: return static_cast<const float*>(values)[at];
  }
}

template <typename T>
struct Out;

template <>
struct Out<__nv_bfloat16> {
  __device__ static std::uint32_t pack(float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const std::uint32_t*>(&both);
  }
  __device__ static float2 unpack(std::uint32_t word) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word));
  }
};

template <>
struct Out<__half> {
  __device__ static std::uint32_t pack(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    return *reinterpret_cast<const std::uint32_t*>(&both);
  }
  __device__ static float2 unpack(std::uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
};

// Stores the thread's two columns of chunks j and j + 1 (of 8 columns each) of one row.
template <typename T>
__device__ void store_pair(T* row, int column, int n, bool is_there, bool accumulate, float2 one,
                           float2 other) {
  const int quarter = threadIdx.x % 4, first = column + 2 * quarter, second = first + 8;
  if constexpr (sizeof(T) == 4) {
    for (int i = 0; i < 2; ++i) {
      const int at = i == 0 ? first : second;
      float2 value = i == 0 ? one : other;
      if (!is_there || at >= n) continue;
      auto* to = reinterpret_cast<float2*>(row + at);
      if (accumulate) {
        const float2 held = *to;
        value.x += held.x;
        value.y += held.y;
      }
      *to = value;
    }
  } else {
    if (accumulate) {
      for (int i = 0; i < 2; ++i) {
        const int at = i == 0 ? first : second;
        const float2 value = i == 0 ? one : other;
        if (!is_there || at >= n) continue;
        auto* to = reinterpret_cast<std::uint32_t*>(row + at);
        const float2 held = Out<T>::unpack(*to);
        *to = Out<T>::pack(value.x + held.x, value.y + held.y);
      }
      return;
    }
    // Of two neighbours one takes four columns of the first chunk, the other of the second.
    const std::uint32_t mine = Out<T>::pack(one.x, one.y), next = Out<T>::pack(other.x, other.y);
    const bool is_odd = quarter % 2 != 0;
    const std::uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, is_odd ? mine : next, 1);
    const int at = is_odd ? second - 2 : first;
    if (is_there && at < n)
      *reinterpret_cast<uint2*>(row + at) = is_odd ? make_uint2(got, next) : make_uint2(mine, got);
  }
}

template <typename T, int kWaves, bool kIsScaled>
__device__ void store_as(const GroupedParams& p, const TileOut& out, float (&sums)[kWaves][64],
                         int first) {
  T* d = static_cast<T*>(p.d[p.contracts ? out.entry : 0]);
  float a_scale[kWaves][2];
#pragma unroll
  for (int v = 0; v < kWaves; ++v)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = 128 * v + first + 8 * half;
      a_scale[v][half] = 1.0f;
      if (!kIsScaled && own < out.rows && !out.is_tail)
        a_scale[v][half] =
            p.a_scale[(out.row + own) * p.a_row_stride + out.group * p.a_group_stride];
    }
  const bool has_bias = p.has_bias && !out.is_tail;
  const float* b_scales = out.is_tail ? nullptr : p.b_scale[p.contracts ? 0 : out.entry];
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float scale[4], bias[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = out.column + 8 * (j + i / 2) + threadIdx.x % 4 * 2 + i % 2;
      const bool is_there = column < p.n && !out.is_tail;
      scale[i] = 1.0f;
      if (!kIsScaled && is_there)
        scale[i] = b_scales[column * p.b_row_stride + out.group * p.b_group_stride];
      bias[i] = has_bias && is_there ? read(p.bias[out.entry], p.bias_type, column) : 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kWaves; ++v)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = 128 * v + first + 8 * half;
        const float a = a_scale[v][half];
        const float* s = &sums[v][4 * j + 2 * half];
        const auto value = [&](int at, int i) {
          const float product = kIsScaled ? s[at] : s[at] * (a * scale[i]);
          return product + bias[i];
        };
        T* row = d + (static_cast<std::int64_t>(out.row) + own) * p.n;
        store_pair<T>(row, out.column + 8 * j, p.n, own < out.rows, p.accumulate,
                      make_float2(value(0, 0), value(1, 1)), make_float2(value(4, 2), value(5, 3)));
      }
  }
}

// `first`: the row of the tile that the thread has in the first wave.
template <int kWaves, bool kIsScaled>
__device__ void store(const GroupedParams& p, const TileOut& out, float (&sums)[kWaves][64],
                      int first) {
  if (p.accumulate && out.is_empty && (out.is_tail || !p.has_bias)) return;
  switch (p.out) {
    case ElementType::kBFloat16:
      return store_as<__nv_bfloat16, kWaves, kIsScaled>(p, out, sums, first);
    case ElementType::kFloat16: return store_as<__half, kWaves, kIsScaled>(p, out, sums, first);
    default: return store_as<float, kWaves, kIsScaled>(p, out, sums, first);
  }
}

}  // namespace fp8core::sm90
