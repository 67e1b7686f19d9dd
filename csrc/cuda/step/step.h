// The launches of steps, of tensors that have been checked.
#pragma once

#include "fp8core/step.h"

namespace fp8core {

void launch_adam(const AdamDesc& desc, const std::vector<StepTensors>& tensors,
                 const AdamNumbers& numbers, cudaStream_t stream);

}  // namespace fp8core
