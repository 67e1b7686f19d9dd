// The entry of NVFP4 casts.
#include <algorithm>

#include "arguments.h"
#include "entry.h"
#include "fp8core/device.h"
#include "nvfp4.cuh"

namespace fp8core {
namespace {

constexpr double kE4M3Max = 448.0;

Nvfp4Side side_of(const ByteScaled& out, float* global_scale_inv, bool is_stochastic,
                  const Nvfp4Arguments& arguments, bool is_row) {
  const auto low = static_cast<std::uint32_t>(arguments.offset);
  const auto high = static_cast<std::uint32_t>(arguments.offset >> 32);
  return {out, global_scale_inv, arguments.workspace, is_stochastic,
          make_uint2(low, high << 1 | (is_row ? 1u : 0u))};
}

template <typename T>
void launch(Nvfp4Params params, unsigned tiles, int multiprocessors, cudaStream_t stream) {
  if (params.transforms) {
    const unsigned blocks =
        std::min<unsigned>({tiles, 4u * multiprocessors, static_cast<unsigned>(kMaxPartials)});
    transformed_amax<T><<<blocks, kFp4Threads, 0, stream>>>(params, tiles);
    params.num_partials = static_cast<int>(blocks);
    params.column.partials = params.partials + kMaxPartials;
  } else {
    params.num_partials = launch_partials_of(params.x, params.partials, multiprocessors, stream);
  }
  const unsigned blocks = std::min<unsigned>(tiles, kFp4Resident<T> * multiprocessors);
  nvfp4_tile<T><<<blocks, kFp4Threads, 0, stream>>>(params, tiles);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace

void quantize_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, int device,
                    cudaStream_t stream) {
  const Matrix& x = arguments.x;
  const ByteScaled &row = arguments.rowwise, &column = arguments.columnwise;
  check(x);
  if (x.rows == 0 || x.cols == 0) return;
  FP8CORE_CHECK_ADDRESS(arguments.workspace, "quantize: the workspace");
  if (row.codes != nullptr) FP8CORE_CHECK_ADDRESS(arguments.row_global, "global_scale_inv");
  if (column.codes != nullptr) FP8CORE_CHECK_ADDRESS(arguments.column_global, "global_scale_inv");
  const bool transforms = desc.transforms && column.codes != nullptr;
  FP8CORE_CHECK(row.codes == nullptr || x.cols % 2 == 0, "x is ", x.rows, " x ", x.cols,
                "; two codes a byte take an even number of columns");
  FP8CORE_CHECK(column.codes == nullptr || x.rows % (transforms ? 16 : 2) == 0, "x is ", x.rows,
                " x ", x.cols, "; columnwise takes a multiple of ", transforms ? 16 : 2, " rows");
  const std::int64_t columns = (x.cols + kFp4Tile - 1) / kFp4Tile;
  const std::int64_t tiles = (x.rows + kFp4Tile - 1) / kFp4Tile * columns;
  check_byte_scaled(row, x.rows, desc.is_square ? kFp4Block : 1, tiles);
  check_byte_scaled(column, x.cols, desc.is_square ? kFp4Block : 1, tiles);
  const DeviceGuard guard(device);
  Nvfp4Params params{};
  params.x = x;
  params.row = side_of(row, arguments.row_global, desc.row_stochastic, arguments, true);
  params.column =
      side_of(column, arguments.column_global, desc.column_stochastic, arguments, false);
  params.key = make_uint2(static_cast<std::uint32_t>(arguments.seed),
                          static_cast<std::uint32_t>(arguments.seed >> 32));
  params.partials = arguments.workspace;
  params.nonfinite = arguments.nonfinite;
  params.largest = static_cast<float>(kE4M3Max * desc.target);
  params.inverse_target = static_cast<float>(1.0 / desc.target);
  params.tile_columns = static_cast<int>(columns);
  params.is_square = desc.is_square;
  params.transforms = transforms;
  params.vector_loads = reads_vectors(x);
  params.vector_rows = x.cols % 16 == 0 && is_aligned(row.codes, 8);
  params.vector_columns = x.rows % 32 == 0 && is_aligned(column.codes, 16);
  const int multiprocessors = num_multiprocessors(device);
  const auto count = static_cast<unsigned>(tiles);
  switch (x.type) {
    case InputType::kFloat32: return launch<float>(params, count, multiprocessors, stream);
    case InputType::kBFloat16: return launch<__nv_bfloat16>(params, count, multiprocessors, stream);
    case InputType::kFloat16: return launch<__half>(params, count, multiprocessors, stream);
  }
}

}  // namespace fp8core
