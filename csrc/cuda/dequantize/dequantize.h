// The launch of dequantize.
#pragma once

#include "fp8core/dequantize.h"

namespace fp8core {

// Of arguments that have been checked, with at least one element.
void launch_dequantize(const DequantizeDesc& desc, const DequantizeArguments& arguments,
                       cudaStream_t stream);

}  // namespace fp8core
