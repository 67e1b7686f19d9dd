// Whether a kernel may read and write vectors of elements at once.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core {

inline bool is_aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Every row of x begins at a multiple of 16 bytes, and holds whole vectors of 8 elements.
inline bool reads_vectors(const Matrix& x, InputType type) {
  const std::int64_t bytes = type == InputType::kFloat32 ? 4 : 2;
  return is_aligned(x.data, 16) && x.cols % 8 == 0 && x.stride * bytes % 16 == 0;
}

}  // namespace fp8core
