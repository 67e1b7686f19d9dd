// The launches of activations, of arguments that apis/ has checked.
#pragma once

#include "fp8core/activation.h"

namespace fp8core {

// Columns of y.
inline std::int64_t columns_of(const ActivationDesc& desc, const Matrix& x) {
  return desc.is_gated ? x.cols / 2 : x.cols;
}

void launch_activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                       cudaStream_t stream);

}  // namespace fp8core
