// The launch of transpose.
#pragma once

#include "fp8core/transpose.h"

namespace fp8core {

// Of arguments that have been checked, with at least one code.
void launch_transpose(const TransposeDesc& desc, const TransposeArguments& arguments,
                      cudaStream_t stream);

}  // namespace fp8core
