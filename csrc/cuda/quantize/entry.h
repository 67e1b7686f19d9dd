// What the files of the input types offer to quantize.cu; one file each, to compile side by side.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core {

struct TileParams;

#define FP8CORE_INPUT(name)                                                                       \
  void launch_from_##name(const QuantizeDesc&, const TileParams&, int num_multiprocessors,        \
                          cudaStream_t);                                                          \
  void launch_pair_from_##name(const QuantizeDesc&, const TileParams&, const TileParams&,         \
                               int num_multiprocessors, cudaStream_t);                            \
  int partials_from_##name(const Matrix&, bool vectors, float* partials, int num_multiprocessors, \
                           cudaStream_t);
FP8CORE_INPUT(float32)
FP8CORE_INPUT(bfloat16)
FP8CORE_INPUT(float16)
#undef FP8CORE_INPUT

// Amaxes of x, which has elements, by the file of its type; returns how many.
int launch_partials_of(const Matrix& x, float* partials, int num_multiprocessors,
                       cudaStream_t stream);

}  // namespace fp8core
