// The launches of activations, of arguments that apis/ has checked.
#pragma once

#include "../quantize/vectors.h"
#include "fp8core/activation.h"

namespace fp8core {

// Columns of y.
inline std::int64_t columns_of(const ActivationDesc& desc, const Matrix& x) {
  return desc.is_gated ? x.cols / 2 : x.cols;
}

// Whether all rows of x, of the halves of x and of the gradient begin at multiples of 16 bytes.
inline bool reads_vectors(const ActivationDesc& desc, const ActivationInputs& inputs) {
  const Matrix& x = inputs.x;
  const std::int64_t n = columns_of(desc, x);
  const Matrix grad = {inputs.grad, x.rows, n, inputs.grad_stride};
  return n % 8 == 0 && reads_vectors(x, desc.input) &&
         (!desc.is_backward || reads_vectors(grad, desc.input));
}

void launch_activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                       cudaStream_t stream);

// `second`: of the second half, null unless the halves of the result are tensors of their own.
void launch_quantize_activation(const QuantizeActivationDesc& desc,
                                const QuantizeActivationArguments& arguments, cudaStream_t stream,
                                const CastSlots* second = nullptr);
void launch_quantize_activation(const QuantizeActivationMxfp8Desc& desc,
                                const QuantizeActivationMxfp8Arguments& arguments,
                                cudaStream_t stream);
void launch_quantize_activation(const QuantizeActivationNvfp4Desc& desc,
                                const QuantizeActivationNvfp4Arguments& arguments,
                                cudaStream_t stream);

}  // namespace fp8core
