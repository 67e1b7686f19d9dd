// The launches of one input type, which from_input.cu compiles, and the choice among them.
#pragma once

#include "../element.h"

namespace fp8core {

struct TileParams;

template <InputType kInput>
struct CastsFrom {
  using Element = ElementOf<kInput>;

  // tile_sums: null, or where the sums of the columns of each tile go, of 16-bit inputs alone.
  static void quantize(const QuantizeDesc& desc, TileParams params, float* tile_sums,
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
  return with_type(type, [&](auto constant) { return run(CastsFrom<constant()>{}); });
}

}  // namespace fp8core
