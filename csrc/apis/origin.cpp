// The origin of the library of kernels, which the build tells it by two macros.
#include "fp8core/origin.h"

namespace fp8core {

const char* source_hash() { return FP8CORE_SOURCE_HASH; }

const char* architectures() { return FP8CORE_ARCHITECTURES; }

}  // namespace fp8core
