// The launch of the update of delayed scales.
#pragma once

#include "fp8core/scale_update.h"

namespace fp8core {

// Of states that have been checked.
void launch_scale_update(const ScaleUpdate& update, cudaStream_t stream);

}  // namespace fp8core
