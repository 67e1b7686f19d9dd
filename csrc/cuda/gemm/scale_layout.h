// The launch that brings byte scales into cuBLASLt's order.
#pragma once

#include "fp8core/microscaling.h"

namespace fp8core {

// Of arguments that have been checked.
void launch_arrange_scales(const ArrangeScalesArguments& arguments, int device,
                           cudaStream_t stream);

}  // namespace fp8core
