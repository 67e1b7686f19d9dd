// The launch of MXFP8 casts.
#include "casts_from.h"
#include "mx.cuh"
#include "vectors.h"

namespace fp8core {
namespace {

template <typename T>
void launch(const Mxfp8Desc& desc, const MxParams& params, unsigned tiles, cudaStream_t stream) {
  if (desc.format == Format::kE4M3)
    mx_tile<T, Format::kE4M3><<<tiles, kTileThreads, 0, stream>>>(params);
  else
    mx_tile<T, Format::kE5M2><<<tiles, kTileThreads, 0, stream>>>(params);
}

}  // namespace

void launch_mxfp8(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments, cudaStream_t stream) {
  const Matrix& x = arguments.x;
  const DeviceGuard guard(desc.device);
  MxParams params{};
  params.rowwise = arguments.rowwise;
  params.columnwise = arguments.columnwise;
  params.inverse_target = static_cast<float>(1.0 / desc.target);
  params.is_square = desc.is_square;
  TileParams& tile = params.tile;
  tile.args.x = x;
  tile.args.rowwise.codes = arguments.rowwise.codes;
  tile.args.columnwise.codes = arguments.columnwise.codes;
  tile.args.column_pitch = x.rows;
  tile.args.nonfinite = arguments.nonfinite;
  tile.part_columns = x.cols;
  tile.tile_columns = static_cast<int>(num_tile_columns(x));
  tile.vector_loads = reads_vectors(x, desc.input);
  tile.vector_rows = x.cols % 8 == 0 && is_aligned(arguments.rowwise.codes, 8);
  tile.vector_columns = x.rows % 16 == 0 && is_aligned(arguments.columnwise.codes, 16);
  const auto tiles = static_cast<unsigned>(num_tiles(x, {}));
  with_input(desc.input, [&](auto casts) {
    launch<typename decltype(casts)::Element>(desc, params, tiles, stream);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
