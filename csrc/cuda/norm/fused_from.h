// The launches of norms with casts of one type of input, which panels.cu, bands.cu and
// two_passes.cu compile.
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

// In one pass over x from memory, in bands. False where the device does not run it for such rows;
// then nothing is launched.
template <typename T>
struct BandsFrom {
  static bool launch(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                     const TileParams& tile, cudaStream_t stream);
};

// In two. `tile` is that of a cast of x.
template <typename T>
struct TwoPassesFrom {
  static void launch(const QuantizeNormDesc& desc, FirstPassParams params, TileParams tile,
                     cudaStream_t stream);
};

}  // namespace fp8core
