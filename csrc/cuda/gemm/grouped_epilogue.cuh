// From sums in registers to d: scales, bias, the sum that is already there, one rounding. A warp's 16
// rows go through shared memory in chunks of 128 bytes a row, so that eight threads store a row's.
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
struct Out<float> {
  __device__ static float2 pack(float x, float y) { return make_float2(x, y); }
  __device__ static float2 unpack(float2 pair) { return pair; }
};

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

constexpr int kChunk = 128, kChunkPitch = kChunk + 16;  // bytes; the gap spreads rows over banks

// What the multiplying warpgroups share for their stores.
struct EpilogueShared {
  float2 columns[2][2][128];  // scale and bias; of every other tile, of each warpgroup
  alignas(16) std::uint8_t rows[8][16 * kChunkPitch];  // of each warp
};

// Factors and terms of a tile, asked for before its products: 128 threads have a column each.
template <int kWaves, bool kIsScaled>
struct Factors {
  float row[kWaves][2];
  float2 column;  // scale, bias

  // `first`: the row of the tile that the thread has in the first wave.
  __device__ Factors(const GroupedParams& p, const TileOut& out, int first) {
#pragma unroll
    for (int v = 0; v < kWaves; ++v)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = 128 * v + first + 8 * half;
        row[v][half] = 1.0f;
        if (!kIsScaled && own < out.rows && !out.is_tail)
          row[v][half] = __ldg(p.a_scale + (out.row + own) * p.a_row_stride +
                               out.group * p.a_group_stride);
      }
    const int at = out.column + threadIdx.x % 128;
    column = make_float2(1.0f, 0.0f);
    if (at >= p.n || out.is_tail) return;
    if (!kIsScaled)
      column.x = __ldg(p.b_scale[p.contracts ? 0 : out.entry] + at * p.b_row_stride +
                       out.group * p.b_group_stride);
    if (p.has_bias) column.y = read(p.bias[out.entry], p.bias_type, at);
  }
};

// Adds what d holds to 16 bytes of a row of float32, for four rows at a time.
__device__ inline void add_held(float4 (&values)[4], float4* const (&to)[4]) {
  float4 held[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    held[i] = to[i] == nullptr ? make_float4(0, 0, 0, 0) : *to[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i].x += held[i].x, values[i].y += held[i].y;
    values[i].z += held[i].z, values[i].w += held[i].w;
  }
}

template <typename T, int kWaves, bool kIsScaled>
__device__ void store_as(const GroupedParams& p, const TileOut& out,
                         const Factors<kWaves, kIsScaled>& factors, const float2* columns,
                         std::uint8_t* staged, float (&sums)[kWaves][64], int first) {
  using Pair = decltype(Out<T>::pack(0.0f, 0.0f));
  constexpr int kColumns = kChunk / sizeof(T);
  const int lane = threadIdx.x % 32, quarter = lane % 4, top = first - lane / 4;
  T* d = static_cast<T*>(p.d[p.contracts ? out.entry : 0]);
  const auto row_of = [&](int own) { return d + (static_cast<std::int64_t>(out.row) + own) * p.n; };
#pragma unroll
  for (int v = 0; v < kWaves; ++v)
#pragma unroll
    for (int chunk = 0; chunk < 128 / kColumns; ++chunk) {
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        const int j = chunk * (kColumns / 8) + i, column = 8 * j + 2 * quarter;
        const float4 both = *reinterpret_cast<const float4*>(&columns[column]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* s = &sums[v][4 * j + 2 * half];
          const float a = factors.row[v][half];
          float x = (kIsScaled ? s[0] : s[0] * (a * both.x)) + both.y;
          float y = (kIsScaled ? s[1] : s[1] * (a * both.z)) + both.w;
          const int own = 128 * v + first + 8 * half;
          if (sizeof(T) == 2 && p.accumulate && own < out.rows && out.column + column < p.n) {
            const float2 held =
                Out<T>::unpack(*reinterpret_cast<const Pair*>(row_of(own) + out.column + column));
            x += held.x, y += held.y;
          }
          *reinterpret_cast<Pair*>(staged + (lane / 4 + 8 * half) * kChunkPitch +
                                   (8 * i + 2 * quarter) * sizeof(T)) = Out<T>::pack(x, y);
        }
      }
      __syncwarp();
      float4 values[4];
      float4* to[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * i + lane / 8, own = 128 * v + top + row;
        const int column = out.column + chunk * kColumns + lane % 8 * (16 / sizeof(T));
        values[i] =
            *reinterpret_cast<const float4*>(staged + row * kChunkPitch + lane % 8 * 16);
        to[i] = own < out.rows && column < p.n
                    ? reinterpret_cast<float4*>(row_of(own) + column) : nullptr;
      }
      if (sizeof(T) == 4 && p.accumulate) add_held(values, to);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (to[i] != nullptr) *to[i] = values[i];
      __syncwarp();
    }
}

template <int kWaves, bool kIsScaled>
__device__ void store(const GroupedParams& p, const TileOut& out,
                      const Factors<kWaves, kIsScaled>& factors, const float2* columns,
                      std::uint8_t* staged, float (&sums)[kWaves][64], int first) {
  if (p.accumulate && out.is_empty && (out.is_tail || !p.has_bias)) return;
  switch (p.out) {
    case ElementType::kBFloat16:
      return store_as<__nv_bfloat16>(p, out, factors, columns, staged, sums, first);
    case ElementType::kFloat16:
      return store_as<__half>(p, out, factors, columns, staged, sums, first);
    default: return store_as<float>(p, out, factors, columns, staged, sums, first);
  }
}

}  // namespace fp8core::sm90
