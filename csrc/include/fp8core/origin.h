// What the library of kernels was built from, and for.
#pragma once

#include "fp8core/check.h"

namespace fp8core FP8CORE_EXPORTED {

// The hash of all sources, those of the bindings included: both libraries are of one build.
const char* source_hash();

// The architectures that it has code for, as nvcc spells them, with spaces between.
const char* architectures();

}  // namespace fp8core FP8CORE_EXPORTED
