// The launches of one input type, which from_input.cu compiles, and the choice among them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "fp8core/quantize.h"

namespace fp8core {

struct TileParams;

template <InputType kInput>
struct CastsFrom {
  using Element =
      std::conditional_t<kInput == InputType::kFloat32, float,
                         std::conditional_t<kInput == InputType::kBFloat16, __nv_bfloat16, __half>>;

  static void quantize(const QuantizeDesc& desc, TileParams params, int num_multiprocessors,
                       cudaStream_t stream);
  static void quantize_pair(const QuantizeDesc& desc, TileParams params, TileParams other,
                            int num_multiprocessors, cudaStream_t stream);
  // Amaxes of x, which has elements; returns how many.
  static int partial_amaxes(const Matrix& x, float* partials, int num_multiprocessors,
                            cudaStream_t stream);
  // Writes the amaxes of kRow, or of the groups of kTensor, to the workspace.
  static void amaxes(Granularity granularity, const TileParams& params, cudaStream_t stream);
};

// Returns run(CastsFrom<type>{}).
template <typename Run>
auto with_input(InputType type, const Run& run) {
  switch (type) {
    case InputType::kFloat32: return run(CastsFrom<InputType::kFloat32>{});
    case InputType::kBFloat16: return run(CastsFrom<InputType::kBFloat16>{});
    case InputType::kFloat16: return run(CastsFrom<InputType::kFloat16>{});
  }
  throw std::invalid_argument("unknown input type");
}

}  // namespace fp8core
