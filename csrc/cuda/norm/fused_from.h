// The launches of norms with casts of one type of input, which panels.cu and two_passes.cu compile.
#pragma once

#include "../quantize/tile_params.h"
#include "fp8core/norm.h"

namespace fp8core {

struct PanelParams;
struct FirstPassParams;

// In one pass over x. False where no cluster of blocks holds a panel of such rows; then nothing is
// launched.
template <typename T>
struct PanelsFrom {
  static bool launch(const QuantizeNormDesc& desc, PanelParams params, cudaStream_t stream);
};

// In two. `tile` is that of a cast of x.
template <typename T>
struct TwoPassesFrom {
  static void launch(const QuantizeNormDesc& desc, FirstPassParams params, TileParams tile,
                     cudaStream_t stream);
};

}  // namespace fp8core
