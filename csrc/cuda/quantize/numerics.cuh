// The arithmetic of a cast, one value at a time: loads, scales, codes. Compiled without fast math:
// divisions and products are the correctly rounded ones that the reference backend computes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "../fp8.cuh"
#include "fp8core/quantize.h"

namespace fp8core {

// 16 bytes that are read once, and that nobody writes. The L2 cache fetches what lies beside them,
// too, for kernels that read whole rows.
__device__ inline uint4 load_16_bytes_of_row(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Eight adjacent elements of a row, as they lie in memory.
template <typename T>
struct Eight;

template <>
struct Eight<float> {
  static constexpr int kWords = 8;
  float4 low, high;
  __device__ uint32_t word(int i) const { return __float_as_uint((*this)[i]); }
  __device__ float operator[](int i) const {
    const float4& half = i < 4 ? low : high;
    return i % 4 == 0 ? half.x : i % 4 == 1 ? half.y : i % 4 == 2 ? half.z : half.w;
  }
  __device__ void load(const float* from) {
    low = __ldcs(reinterpret_cast<const float4*>(from));
    high = __ldcs(reinterpret_cast<const float4*>(from) + 1);
  }
  __device__ void load_in_order(const float* from) {
    const uint4 first = load_16_bytes_of_row(from), second = load_16_bytes_of_row(from + 4);
    low = *reinterpret_cast<const float4*>(&first);
    high = *reinterpret_cast<const float4*>(&second);
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
  __device__ void store(float* to) const {
    __stcs(reinterpret_cast<float4*>(to), low);
    __stcs(reinterpret_cast<float4*>(to) + 1, high);
  }
  __device__ float amax() const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf((*this)[i]));  // fmaxf drops NaN
    return largest;
  }
};

template <typename T, typename Pair>
struct EightHalves {
  static constexpr int kWords = 4;
  uint4 bits;
  __device__ uint32_t word(int i) const {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
  __device__ Pair pair(int i) const {
    const uint32_t both = word(i);
    return *reinterpret_cast<const Pair*>(&both);
  }
  __device__ float operator[](int i) const {
    const Pair both = pair(i / 2);
    return static_cast<float>(i % 2 == 0 ? both.x : both.y);
  }
  __device__ void load(const T* from) { bits = __ldcs(reinterpret_cast<const uint4*>(from)); }
  __device__ void load_in_order(const T* from) { bits = load_16_bytes_of_row(from); }
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
  __device__ void store(T* to) const { __stcs(reinterpret_cast<uint4*>(to), bits); }
  __device__ float amax() const {
    // abs, then max, two elements an instruction; __hmax2 drops NaN as fmaxf does.
    Pair largest = __hmax2(__habs2(pair(0)), __habs2(pair(1)));
    largest = __hmax2(largest, __hmax2(__habs2(pair(2)), __habs2(pair(3))));
    return fmaxf(fmaxf(0.0f, static_cast<float>(largest.x)), static_cast<float>(largest.y));
  }
};

// Two floats, each rounded to the nearest, ties to even; beyond the largest value lies inf.
__device__ inline uint32_t rounded_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ inline uint32_t rounded_pair(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <>
struct Eight<__nv_bfloat16> : EightHalves<__nv_bfloat16, __nv_bfloat162> {};
template <>
struct Eight<__half> : EightHalves<__half, __half2> {};

// Eight floats, rounded once to T.
template <typename T>
__device__ Eight<T> rounded(const float (&v)[8]) {
  Eight<T> x;
  if constexpr (std::is_same_v<T, float>) {
    x.low = make_float4(v[0], v[1], v[2], v[3]);
    x.high = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    x.bits = make_uint4(rounded_pair(v[0], v[1], T{}), rounded_pair(v[2], v[3], T{}),
                        rounded_pair(v[4], v[5], T{}), rounded_pair(v[6], v[7], T{}));
  }
  return x;
}

// How many of the elements in a word of memory are NaN or inf: their exponents are all ones.
template <typename T>
__device__ int nonfinite_in(uint32_t word) {
  if constexpr (std::is_same_v<T, float>) {
    return (word & 0x7FFFFFFFu) >= 0x7F800000u ? 1 : 0;
  } else {
    // Two elements s eeeeeeee mmmmmmm, with s cleared. Adding 1 to e carries into s only if e is
    // all ones.
    constexpr uint32_t kOneMore = std::is_same_v<T, __nv_bfloat16> ? 0x00800080u : 0x04000400u;
    return __popc(((word & 0x7FFF7FFFu) + kOneMore) & 0x80008000u);
  }
}

// The largest magnitude of words taken one by one. Once a NaN was taken it stays NaN, so it is
// finite only if all elements were.
template <typename T>
struct Largest {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t bits = 0;

  __device__ void take(uint32_t word) {
    if constexpr (std::is_same_v<T, float>) {
      float both;
      asm("max.NaN.f32 %0, %1, %2;"
          : "=f"(both)
          : "f"(__uint_as_float(bits)), "f"(fabsf(__uint_as_float(word))));
      bits = __float_as_uint(both);
    } else {  // two elements an instruction
      const Pair both = __hmax2_nan(*reinterpret_cast<const Pair*>(&bits),
                                    __habs2(*reinterpret_cast<const Pair*>(&word)));
      bits = *reinterpret_cast<const uint32_t*>(&both);
    }
  }
  __device__ bool is_finite() const { return nonfinite_in<T>(bits) == 0; }
  // If it is finite.
  __device__ float amax() const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(bits);
    } else {
      const Pair both = *reinterpret_cast<const Pair*>(&bits);
      return fmaxf(static_cast<float>(both.x), static_cast<float>(both.y));
    }
  }
};

// Adds how many of a thread's elements, in kWords words, are NaN or inf to `total`, if that is not
// null. All threads of a warp call it. If all elements are finite nothing is written, and the check
// takes half an instruction an element, or one in float.
template <typename T, int kWords, typename WordAt>
__device__ void count_nonfinite(const WordAt& word, unsigned long long* total) {
  if (total == nullptr) return;
  Largest<T> largest;
#pragma unroll
  for (int i = 0; i < kWords; ++i) largest.take(word(i));
  if (__all_sync(0xFFFFFFFFu, largest.is_finite())) return;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) count += nonfinite_in<T>(word(i));
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (threadIdx.x % 32 == 0) atomicAdd(total, static_cast<unsigned long long>(count));
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
  float largest = shared[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = fmaxf(largest, shared[warp]);
  return largest;
}

// The bits of floats that are not negative, read as integers, have the order of the floats.
__device__ inline void atomic_amax(float* where, float amax) {
  if (amax > *reinterpret_cast<volatile float*>(where))
    atomicMax(reinterpret_cast<int*>(where), __float_as_int(amax));
}

}  // namespace fp8core
