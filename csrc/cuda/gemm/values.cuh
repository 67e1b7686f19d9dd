// Single values of a type that only the run tells.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "fp8core/gemm.h"

namespace fp8core {

__device__ inline float read(const void* values, ElementType type, std::int64_t at) {
  switch (type) {
    case ElementType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[at]);
    case ElementType::kFloat16: return __half2float(static_cast<const __half*>(values)[at]);
    default: return static_cast<const float*>(values)[at];
  }
}

__device__ inline void write(void* values, ElementType type, std::int64_t at, float value) {
  switch (type) {
    case ElementType::kBFloat16:
      static_cast<__nv_bfloat16*>(values)[at] = __float2bfloat16_rn(value);
      return;
    case ElementType::kFloat16: static_cast<__half*>(values)[at] = __float2half_rn(value); return;
    default: static_cast<float*>(values)[at] = value;
  }
}

}  // namespace fp8core
