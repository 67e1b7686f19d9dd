// The entry of MXFP8 casts.
#include "arguments.h"
#include "fp8core/device.h"
#include "mx.cuh"

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

void quantize_mxfp8(const Mxfp8Desc& desc, const Matrix& x, const ByteScaled& rowwise,
                    const ByteScaled& columnwise, unsigned long long* nonfinite, int device,
                    cudaStream_t stream) {
  check(x);
  if (x.rows == 0 || x.cols == 0) return;
  const std::int64_t columns = (x.cols + kTile - 1) / kTile;
  const std::int64_t tiles = (x.rows + kTile - 1) / kTile * columns;
  check_byte_scaled(rowwise, x.rows, desc.is_square ? kMxBlock : 1, tiles);
  check_byte_scaled(columnwise, x.cols, desc.is_square ? kMxBlock : 1, tiles);
  const DeviceGuard guard(device);
  MxParams params{};
  params.rowwise = rowwise;
  params.columnwise = columnwise;
  params.inverse_target = static_cast<float>(1.0 / desc.target);
  params.is_square = desc.is_square;
  TileParams& tile = params.tile;
  tile.args.x = x;
  tile.args.rowwise.codes = rowwise.codes;
  tile.args.columnwise.codes = columnwise.codes;
  tile.args.column_pitch = x.rows;
  tile.args.nonfinite = nonfinite;
  tile.tile_columns = static_cast<int>(columns);
  tile.vector_loads = reads_vectors(x);
  tile.vector_rows = x.cols % 8 == 0 && is_aligned(rowwise.codes, 8);
  tile.vector_columns = x.rows % 16 == 0 && is_aligned(columnwise.codes, 16);
  const auto count = static_cast<unsigned>(tiles);
  switch (x.type) {
    case InputType::kFloat32: launch<float>(desc, params, count, stream); break;
    case InputType::kBFloat16: launch<__nv_bfloat16>(desc, params, count, stream); break;
    case InputType::kFloat16: launch<__half>(desc, params, count, stream); break;
  }
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
