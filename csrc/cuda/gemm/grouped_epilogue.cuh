// From sums in registers to d: scales, bias, the value that d holds already, one rounding. A warp's
// 16 rows go through shared memory in chunks of 128 bytes a row, so that eight threads store a
// row's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "grouped_params.h"
#include "values.cuh"

namespace fp8core::sm90 {

struct TileOut {
  int row, rows, column;  // rows: from `row` to the group's end, may be more than the tile has
  int group, entry;
  bool is_tail;   // rows of no group: zeros
  bool is_empty;  // k of the group is 0: the sums are zeros
};

// Loads where it is called; the compiler would move the load to the first use of the value.
__device__ inline float read_early(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

template <typename T>
__device__ auto pack(float x, float y) {
  if constexpr (sizeof(T) == 4)
    return make_float2(x, y);
  else if constexpr (std::is_same_v<T, __half>)
    return __floats2half2_rn(x, y);
  else
    return __floats2bfloat162_rn(x, y);
}

constexpr int kChunk = 128, kChunkPitch = kChunk + 16;  // bytes; the gap spreads rows over banks

// Shared memory that the multiplying warpgroups store by.
struct EpilogueShared {
  float2 columns[2][2][128];  // scale and bias; of every other tile, of each warpgroup
  alignas(16) std::uint8_t rows[8][16 * kChunkPitch];  // of each warp
};

// Scales and biases of a tile, loaded before its products: each of 128 threads loads a column's.
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
        const int row_in_tile = 128 * v + first + 8 * half;
        row[v][half] = 1.0f;
        if (!kIsScaled && row_in_tile < out.rows && !out.is_tail)
          row[v][half] = read_early(p.a_scale + (out.row + row_in_tile) * p.a_row_stride +
                                    out.group * p.a_group_stride);
      }
    const int at = out.column + threadIdx.x % 128;
    column = make_float2(1.0f, 0.0f);
    if (at >= p.n || out.is_tail) return;
    if (!kIsScaled)
      column.x = read_early(p.b_scale[p.contracts ? 0 : out.entry] + at * p.b_row_stride +
                            out.group * p.b_group_stride);
    if (p.has_bias) column.y = read(p.bias[out.entry], p.bias_type, at);
  }
};

// Adds the values that d holds to 16 bytes of each of four rows, `step` floats apart.
__device__ inline void add_held(float4 (&values)[4], const float* d, std::int64_t step, int rows) {
  float4 held[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    held[i] =
        4 * i < rows ? *reinterpret_cast<const float4*>(d + i * step) : make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i].x += held[i].x, values[i].y += held[i].y;
    values[i].z += held[i].z, values[i].w += held[i].w;
  }
}

// Writes the thread's values of one chunk of columns, of one wave, to the shared memory of its
// warp.
template <typename T, bool kIsScaled>
__device__ void stage(const float (&sums)[64], const float (&row)[2], const float2* columns,
                      std::uint8_t* staged, int chunk) {
  constexpr int kCount = kChunk / sizeof(T) / 8;  // of 8 columns each
  const int lane = threadIdx.x % 32, quarter = lane % 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int j = chunk * kCount + i;
    const float4 both = *reinterpret_cast<const float4*>(&columns[8 * j + 2 * quarter]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *s = &sums[4 * j + 2 * half], a = row[half];
      const float x = (kIsScaled ? s[0] : s[0] * (a * both.x)) + both.y;
      const float y = (kIsScaled ? s[1] : s[1] * (a * both.z)) + both.w;
      auto* to = staged + (lane / 4 + 8 * half) * kChunkPitch + (8 * i + 2 * quarter) * sizeof(T);
      *reinterpret_cast<decltype(pack<T>(x, y))*>(to) = pack<T>(x, y);
    }
  }
}

template <typename T, bool kAccumulate, int kWaves, bool kIsScaled>
__device__ void store_as(const GroupedParams& p, const TileOut& out,
                         const Factors<kWaves, kIsScaled>& factors, const float2* columns,
                         std::uint8_t* staged, float (&sums)[kWaves][64], int first) {
  constexpr int kColumns = kChunk / sizeof(T);
  const int lane = threadIdx.x % 32, column = out.column + lane % 8 * (16 / sizeof(T));
  const int top = first - lane / 4 + lane / 8;  // of the rows that this thread stores
  const std::uint8_t* from = staged + lane / 8 * kChunkPitch + lane % 8 * 16;
  T* d = static_cast<T*>(p.d[p.contracts ? out.entry : 0]) +
         (static_cast<std::int64_t>(out.row) + top) * p.n + column;
  const std::int64_t step = 4 * static_cast<std::int64_t>(p.n);
#pragma unroll
  for (int v = 0; v < kWaves; ++v) {
    const int rows = out.rows - 128 * v - top;
#pragma unroll
    for (int chunk = 0; chunk < 128 / kColumns; ++chunk) {
      stage<T, kIsScaled>(sums[v], factors.row[v], columns, staged, chunk);
      __syncwarp();
      const int left = column + chunk * kColumns < p.n ? rows : 0;
      T* to = d + chunk * kColumns;
      float4 values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] = *reinterpret_cast<const float4*>(from + 4 * i * kChunkPitch);
      if constexpr (kAccumulate) add_held(values, to, step, left);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (4 * i < left) *reinterpret_cast<float4*>(to + i * step) = values[i];
      __syncwarp();
    }
    d += 32 * step;
  }
}

template <int kWaves, bool kIsScaled>
__device__ void store(const GroupedParams& p, const TileOut& out,
                      const Factors<kWaves, kIsScaled>& factors, const float2* columns,
                      std::uint8_t* staged, float (&sums)[kWaves][64], int first) {
  if (p.accumulate) {
    if (out.is_empty && (out.is_tail || !p.has_bias)) return;
    return store_as<float, /*kAccumulate=*/true>(p, out, factors, columns, staged, sums, first);
  }
  switch (p.out) {
    case ElementType::kBFloat16:
      return store_as<__nv_bfloat16, /*kAccumulate=*/false>(p, out, factors, columns, staged, sums,
                                                            first);
    case ElementType::kFloat16:
      return store_as<__half, /*kAccumulate=*/false>(p, out, factors, columns, staged, sums, first);
    default:
      return store_as<float, /*kAccumulate=*/false>(p, out, factors, columns, staged, sums, first);
  }
}

}  // namespace fp8core::sm90
