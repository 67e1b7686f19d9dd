// The launches of norms of one input type, which from_input.cu compiles.
#pragma once

#include "fp8core/norm.h"

namespace fp8core {

struct NormParams;
struct NormBackwardParams;

template <typename T>
struct NormsFrom {
  static void norm(NormKind kind, NormParams params, int device, cudaStream_t stream);
  static int backward_partials(NormKind kind, std::int64_t rows, std::int64_t cols, int device);
  static void backward(NormKind kind, NormBackwardParams params, int device, cudaStream_t stream);
};

}  // namespace fp8core
