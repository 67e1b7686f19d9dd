// The launch of the rotary embedding, of arguments that apis/ has checked.
#pragma once

#include "fp8core/rotary.h"

namespace fp8core {

// Of at least one element.
void launch_rotary(const RotaryDesc& desc, const RotaryArguments& arguments, cudaStream_t stream);

}  // namespace fp8core
