// The launches of one input type, which from_input.cu compiles.
#pragma once

#include "fp8core/activation.h"

namespace fp8core {

struct PointwiseParams;

template <InputType kInput>
struct ActivationsFrom {
  // `params.units` of y: vectors of 8 elements, or elements.
  static void launch(const ActivationDesc& desc, const PointwiseParams& params, bool is_of_vectors,
                     cudaStream_t stream);
};

}  // namespace fp8core
