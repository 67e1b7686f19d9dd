// The launches of NVFP4 casts.
#include <algorithm>

#include "casts_from.h"
#include "nvfp4.cuh"
#include "vectors.h"

namespace fp8core {
namespace {

constexpr double kE4M3Max = 448.0;

Nvfp4Side side_of(const ByteScaled& out, float* global_scale_inv, bool is_stochastic,
                  const Nvfp4Arguments& arguments, bool is_row) {
  const auto offset = static_cast<std::uint64_t>(arguments.offset);
  const auto low = static_cast<std::uint32_t>(offset);
  const auto high = static_cast<std::uint32_t>(offset >> 32);
  return {out, global_scale_inv, arguments.workspace, is_stochastic,
          make_uint2(low, high << 1 | (is_row ? 1u : 0u))};
}

template <typename Casts>
void launch(Nvfp4Params params, unsigned tiles, int multiprocessors, cudaStream_t stream) {
  using T = typename Casts::Element;
  if (params.transforms) {
    const unsigned blocks =
        std::min<unsigned>({tiles, 4u * multiprocessors, static_cast<unsigned>(kMaxPartials)});
    transformed_amax<T><<<blocks, kFp4Threads, 0, stream>>>(params, tiles);
    params.num_partials = static_cast<int>(blocks);
    params.column.partials = params.partials + kMaxPartials;
  } else {
    params.num_partials = Casts::partial_amaxes(params.x, params.partials, multiprocessors, stream);
  }
  const unsigned blocks = std::min<unsigned>(tiles, kFp4Resident<T> * multiprocessors);
  nvfp4_tile<T><<<blocks, kFp4Threads, 0, stream>>>(params, tiles);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace

void launch_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, cudaStream_t stream) {
  const Matrix& x = arguments.x;
  const ByteScaled &row = arguments.rowwise, &column = arguments.columnwise;
  const auto seed = static_cast<std::uint64_t>(arguments.seed);
  const DeviceGuard guard(desc.device);
  Nvfp4Params params{};
  params.x = x;
  params.row = side_of(row, arguments.row_global, desc.row_stochastic, arguments, true);
  params.column =
      side_of(column, arguments.column_global, desc.column_stochastic, arguments, false);
  params.key = make_uint2(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  params.partials = arguments.workspace;
  params.nonfinite = arguments.nonfinite;
  params.largest = static_cast<float>(kE4M3Max * desc.target);
  params.inverse_target = static_cast<float>(1.0 / desc.target);
  params.tile_columns = static_cast<int>(num_tile_columns(x));
  params.is_square = desc.is_square;
  params.transforms = desc.transforms && column.codes != nullptr;
  params.vector_loads = reads_vectors(x, desc.input);
  params.vector_rows = x.cols % 16 == 0 && is_aligned(row.codes, 8);
  params.vector_columns = x.rows % 32 == 0 && is_aligned(column.codes, 16);
  const auto tiles = static_cast<unsigned>(num_tiles(x, {}));
  const int multiprocessors = num_multiprocessors(desc.device);
  with_input(desc.input,
             [&](auto casts) { launch<decltype(casts)>(params, tiles, multiprocessors, stream); });
}

}  // namespace fp8core
