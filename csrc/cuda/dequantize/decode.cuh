// The values of codes and of scales, exactly, in float32.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../fp8.cuh"
#include "fp8core/dequantize.h"

namespace fp8core {

// Two float16 in a word. Every value of e4m3 and e5m2 is one, NaN and inf included.
__device__ inline float2 both_halves(uint32_t halves) {
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// The values of two adjacent elements: of the two low bytes of `codes`, of e2m1 of the low byte.
template <ElementType kFormat>
__device__ float2 decode2(uint32_t codes) {
  if constexpr (kFormat == ElementType::kE2M1) {
    // e2m1 seem as the sign, the last two bits of the exponent and the first of the mantissa of a
    // float: s000000e em000000 ..., the value times 2^-126, subnormal where ee is 0.
    const auto value = [](uint32_t code) {
      return __fmul_rn(__uint_as_float((code & 7) << 22 | (code & 8) << 28), 0x1p126f);
    };
    return make_float2(value(codes), value(codes >> 4));
  } else {
    constexpr Format kIts = kFormat == ElementType::kE4M3 ? Format::kE4M3 : Format::kE5M2;
    return both_halves(decode2_into_halves<kIts>(codes));
  }
}

// 2^(e - 127): the exponent of a float; for e = 0 the subnormal 2^-127, for 255 NaN.
__device__ inline float e8m0_value(uint32_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : code << 23;
  return __uint_as_float(code == 255 ? 0x7FC00000u : bits);
}

}  // namespace fp8core
