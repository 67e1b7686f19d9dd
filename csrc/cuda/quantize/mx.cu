// The launch of MXFP8 casts.
#include "casts_from.h"
#include "mx.cuh"

namespace fp8core {
namespace {

template <typename T>
void launch(const Mxfp8Desc& desc, const TileParams& tile, const MxParams& params, unsigned tiles,
            cudaStream_t stream) {
  using Source = MatrixSource<T>;
  const CastParams<Source> cast = {tile, {}, tiles};
  if (desc.format == Format::kE4M3)
    mx_tile<Source, Encoder<Format::kE4M3>><<<tiles, kTileThreads, 0, stream>>>(cast, params);
  else
    mx_tile<Source, Encoder<Format::kE5M2>><<<tiles, kTileThreads, 0, stream>>>(cast, params);
}

}  // namespace

void launch_mxfp8(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments, cudaStream_t stream) {
  const Matrix& x = arguments.x;
  const DeviceGuard guard(desc.device);
  const TileParams tile = tile_params(desc, arguments);
  const auto tiles = static_cast<unsigned>(num_tiles(x, {}));
  with_input(desc.input, [&](auto casts) {
    launch<typename decltype(casts)::Element>(desc, tile, mx_params(desc, arguments), tiles,
                                              stream);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
