// The arithmetic of a cast, one value at a time: loads, scales, codes. Compiled without fast math:
// divisions and products are the correctly rounded ones that the reference backend computes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "fp8core/quantize.h"

namespace fp8core {

// Eight adjacent elements of a row, as they lie in memory.
template <typename T>
struct Eight;

template <>
struct Eight<float> {
  float4 low, high;
  __device__ float operator[](int i) const {
    const float4& half = i < 4 ? low : high;
    return i % 4 == 0 ? half.x : i % 4 == 1 ? half.y : i % 4 == 2 ? half.z : half.w;
  }
  __device__ void load(const float* from) {
    low = __ldcs(reinterpret_cast<const float4*>(from));
    high = __ldcs(reinterpret_cast<const float4*>(from) + 1);
  }
  __device__ void load_kept(const float* from) {
    low = __ldg(reinterpret_cast<const float4*>(from));
    high = __ldg(reinterpret_cast<const float4*>(from) + 1);
  }
  __device__ void gather(const float* from, int count) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < count ? from[i] : 0.0f;
    low = make_float4(v[0], v[1], v[2], v[3]);
    high = make_float4(v[4], v[5], v[6], v[7]);
  }
  __device__ float amax() const {
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) found = fmaxf(found, fabsf((*this)[i]));  // fmaxf drops NaN
    return found;
  }
};

template <typename T, typename Pair>
struct EightHalves {
  uint4 bits;
  __device__ Pair pair(int i) const {
    const uint32_t word = i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
    return *reinterpret_cast<const Pair*>(&word);
  }
  __device__ float operator[](int i) const {
    const Pair both = pair(i / 2);
    return static_cast<float>(i % 2 == 0 ? both.x : both.y);
  }
  __device__ void load(const T* from) { bits = __ldcs(reinterpret_cast<const uint4*>(from)); }
  __device__ void load_kept(const T* from) { bits = __ldg(reinterpret_cast<const uint4*>(from)); }
  __device__ void gather(const T* from, int count) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto* raw = reinterpret_cast<const uint16_t*>(from);
      const uint32_t first = 2 * i < count ? raw[2 * i] : 0;
      const uint32_t second = 2 * i + 1 < count ? raw[2 * i + 1] : 0;
      words[i] = first | second << 16;
    }
    bits = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ float amax() const {
    // abs, then max, two elements an instruction; __hmax2 drops NaN as fmaxf does.
    Pair found = __hmax2(__habs2(pair(0)), __habs2(pair(1)));
    found = __hmax2(found, __hmax2(__habs2(pair(2)), __habs2(pair(3))));
    return fmaxf(fmaxf(0.0f, static_cast<float>(found.x)), static_cast<float>(found.y));
  }
};

template <>
struct Eight<__nv_bfloat16> : EightHalves<__nv_bfloat16, __nv_bfloat162> {};
template <>
struct Eight<__half> : EightHalves<__half, __half2> {};

// Codes of two values, the first in the low byte: nearest even, +-max for what is beyond and inf,
// 0x7F for NaN.
template <Format F>
__device__ uint32_t encode2(float first, float second) {
  uint16_t codes;
  if constexpr (F == Format::kE4M3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
}

template <Format F>
__device__ uint32_t encode4(float a, float b, float c, float d) {
  return encode2<F>(a, b) | encode2<F>(c, d) << 16;
}

// Source: docs/numerics.md, current scaling and block scaling.
__device__ inline float scale_of(float amax, const ScaleRule& rule) {
  const float floored = fmaxf(amax, rule.epsilon);
  if (floored == 0.0f || isinf(floored)) return 1.0f;
  float scale = __fdiv_rn(rule.target, floored);
  if (isinf(scale)) scale = rule.largest;
  // s eeeeeeee mmm...m -> s eeeeeeee 000...0: clearing the mantissa rounds down.
  if (rule.power_of_two) scale = __uint_as_float(__float_as_uint(scale) & 0x7F800000u);
  return scale;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, lane));
  return value;
}

// The largest value of a block of kThreads threads, known to all of them. `shared` holds
// kThreads / 32 floats and is free again after the next barrier.
template <int kThreads>
__device__ float block_max(float value, float* shared) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float found = shared[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) found = fmaxf(found, shared[warp]);
  return found;
}

// Magnitudes order as their bits do. An amax is never negative or NaN.
__device__ inline void atomic_amax(float* where, float amax) {
  if (amax > *reinterpret_cast<volatile float*>(where))
    atomicMax(reinterpret_cast<int*>(where), __float_as_int(amax));
}

}  // namespace fp8core
