// The launches of norms, of arguments that apis/ has checked.
#pragma once

#include "fp8core/norm.h"

namespace fp8core {

void launch_norm(const NormDesc& desc, const NormArguments& arguments, cudaStream_t stream);
int count_backward_partials(const NormDesc& desc, std::int64_t rows, std::int64_t cols);
void launch_norm_backward(const NormDesc& desc, const NormBackwardArguments& arguments,
                          cudaStream_t stream);

void launch_quantize_norm(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                          cudaStream_t stream);

}  // namespace fp8core
