// The norms of one type of input. backends/cuda/build.py compiles this file once for each
// InputType, side by side: FP8CORE_INPUT names its enumerator.
#include "../element.h"
#include "launch.cuh"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kFloat32, kBFloat16 or kFloat16"
#endif

namespace fp8core {

template struct NormsFrom<ElementOf<InputType::FP8CORE_INPUT>>;

}  // namespace fp8core
