// Codes of FP8 and their values: by instructions from compute capability 8.9 on, before it by
// integers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "fp8core/quantize.h"

namespace fp8core {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
#define FP8CORE_HAS_FP8 1
#endif

// The code of a value, by integers: what the instructions return.
template <Format F>
__device__ uint32_t encode_by_bits(float value) {
  constexpr bool kIsE4M3 = F == Format::kE4M3;
  constexpr int kMantissa = kIsE4M3 ? 3 : 2, kBias = kIsE4M3 ? 7 : 15;
  constexpr int kDropped = 23 - kMantissa;  // bits of a float's mantissa
  constexpr float kLargest = kIsE4M3 ? 448.0f : 57344.0f;
  constexpr float kNormal = kIsE4M3 ? 0x1p-6f : 0x1p-14f;
  // Its unit in the last place is the smallest value: the sum's last bits count how many.
  constexpr float kSteps = kIsE4M3 ? 0x1p14f : 0x1p7f;
  if (isnan(value)) return 0x7F;
  const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
  const float size = fminf(fabsf(value), kLargest);
  if (size < kNormal)
    return sign | (__float_as_uint(__fadd_rn(size, kSteps)) - __float_as_uint(kSteps));
  uint32_t bits = __float_as_uint(size);
  bits += ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1);  // to nearest, ties to even
  return sign | ((bits >> kDropped) - ((127 - kBias) << kMantissa));
}

// Codes of two values, the first in the low byte: rounded to nearest even, values beyond the
// largest and inf become +-max, NaN becomes 0x7F.
template <Format F>
__device__ uint32_t encode2(float first, float second) {
#ifdef FP8CORE_HAS_FP8
  uint16_t codes;
  if constexpr (F == Format::kE4M3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return encode_by_bits<F>(first) | encode_by_bits<F>(second) << 8;
#endif
}

// The value of a code of e4m3, exactly.
__device__ inline float e4m3_value(uint32_t code) {
  if ((code & 0x7F) == 0x7F) return __uint_as_float(0x7FC00000u);
  // s eeee mmm -> s 0000eeee mmm0...0, the value times 2^-120.
  return __fmul_rn(__uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20), 0x1p120f);
}

// The values of the two codes in the low bytes: two float16 in a word, exactly, NaN and inf
// included.
template <Format F>
__device__ uint32_t decode2_into_halves(uint32_t codes) {
#ifdef FP8CORE_HAS_FP8
  uint32_t halves;
  if constexpr (F == Format::kE4M3)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
#else
  if constexpr (F == Format::kE5M2) return (codes & 0xFF) << 8 | (codes & 0xFF00) << 16;
  const __half2 values = __floats2half2_rn(e4m3_value(codes), e4m3_value(codes >> 8));
  return *reinterpret_cast<const uint32_t*>(&values);
#endif
}

// The values of four codes of e4m3. A pair is a register's half, which needs no shift.
__device__ inline void decode4_into_halves(uint32_t codes, uint32_t& low, uint32_t& high) {
#ifdef FP8CORE_HAS_FP8
  asm("{\n.reg .b16 first, last;\n"
      "mov.b32 {first, last}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, last;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = decode2_into_halves<Format::kE4M3>(codes);
  high = decode2_into_halves<Format::kE4M3>(codes >> 16);
#endif
}

}  // namespace fp8core
