// The C++ types of InputType's enumerators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <type_traits>

#include "fp8core/quantize.h"

namespace fp8core {

template <InputType kType>
using ElementOf =
    std::conditional_t<kType == InputType::kFloat32, float,
                       std::conditional_t<kType == InputType::kBFloat16, __nv_bfloat16, __half>>;

// Returns run(std::integral_constant<InputType, type>{}).
template <typename Run>
auto with_type(InputType type, const Run& run) {
  using Type = InputType;
  switch (type) {
    case Type::kFloat32: return run(std::integral_constant<Type, Type::kFloat32>{});
    case Type::kBFloat16: return run(std::integral_constant<Type, Type::kBFloat16>{});
    case Type::kFloat16: return run(std::integral_constant<Type, Type::kFloat16>{});
  }
  throw std::invalid_argument("unknown type of elements");
}

}  // namespace fp8core
