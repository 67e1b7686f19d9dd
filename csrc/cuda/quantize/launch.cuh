// From a descriptor to a kernel, for one input type.
#pragma once

#include <algorithm>

#include "tile.cuh"

namespace fp8core {

template <typename T, Format F>
void launch_format(const QuantizeDesc& desc, const TileParams& p, unsigned tiles,
                   cudaStream_t stream) {
  switch (desc.granularity) {
    case Granularity::kDelayed:
      uniform_tile<T, F, Granularity::kDelayed><<<tiles, kTileThreads, 0, stream>>>(p);
      break;
    case Granularity::kTensor:
      uniform_tile<T, F, Granularity::kTensor><<<tiles, kTileThreads, 0, stream>>>(p);
      break;
    case Granularity::kBlock128:
      uniform_tile<T, F, Granularity::kBlock128><<<tiles, kTileThreads, 0, stream>>>(p);
      break;
    case Granularity::kVec128:
      directed_tile<T, F, Granularity::kVec128><<<tiles, kTileThreads, 0, stream>>>(p);
      break;
    case Granularity::kRow:
      directed_tile<T, F, Granularity::kRow><<<tiles, kTileThreads, 0, stream>>>(p);
      break;
  }
}

template <typename T>
int launch_partials(const Matrix& x, bool vectors, float* partials, int num_multiprocessors,
                    cudaStream_t stream) {
  const int64_t elements = x.rows * x.cols;
  const int64_t wanted = (elements + 8 * kAmaxThreads - 1) / (8 * kAmaxThreads);
  const int blocks = static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>({wanted, 3 * num_multiprocessors, kMaxPartials})));
  const bool is_flat = x.stride == x.cols && elements % 8 == 0;
  amax_partials<T><<<blocks, kAmaxThreads, 0, stream>>>(
      static_cast<const T*>(x.data), is_flat ? 1 : x.rows, is_flat ? elements : x.cols, x.stride,
      vectors, partials);
  return blocks;
}

inline int64_t dense_tiles(TileParams& p) {
  const Matrix& x = p.args.x;
  p.scale_tiles = (x.rows + kTile - 1) / kTile;
  return p.scale_tiles * p.tile_columns;
}

template <typename T>
void launch_pair(const QuantizeDesc& desc, TileParams p, TileParams other, int num_multiprocessors,
                 cudaStream_t stream) {
  const int64_t first = dense_tiles(p), tiles = first + dense_tiles(other);
  FP8CORE_CHECK(tiles < (int64_t{1} << 31), "quantize_pair: ", tiles,
                " tiles of 128 x 128, more than a grid takes");
  const unsigned grid = static_cast<unsigned>(tiles), own = static_cast<unsigned>(first);
  if (desc.granularity == Granularity::kDelayed) {
    uniform_tile_pair<T, Format::kE4M3, Granularity::kDelayed>
        <<<grid, kTileThreads, 0, stream>>>(p, other, own);
  } else {
    for (TileParams* one : {&p, &other})
      one->args.num_partials = launch_partials<T>(one->args.x, one->vector_loads,
                                                  one->args.workspace, num_multiprocessors, stream);
    uniform_tile_pair<T, Format::kE4M3, Granularity::kTensor>
        <<<grid, kTileThreads, 0, stream>>>(p, other, own);
  }
  FP8CORE_CUDA(cudaGetLastError());
}

template <typename T>
void launch(const QuantizeDesc& desc, TileParams p, int num_multiprocessors, cudaStream_t stream) {
  const Matrix& x = p.args.x;
  const Groups& groups = p.args.groups;
  const bool is_grouped = groups.offsets != nullptr;
  const int64_t tile_rows =
      is_grouped ? x.rows / kTile + groups.count + 1 : (x.rows + kTile - 1) / kTile;
  p.scale_tiles = is_grouped ? tile_rows - 1 : tile_rows;
  const int64_t tiles = tile_rows * p.tile_columns;
  FP8CORE_CHECK(tiles < (int64_t{1} << 31), "quantize: ", x.rows, " x ", x.cols, " has ", tiles,
                " tiles of 128 x 128, more than a grid takes");
  if (desc.granularity == Granularity::kTensor && is_grouped) {
    FP8CORE_CUDA(cudaMemsetAsync(p.args.workspace, 0, groups.count * sizeof(float), stream));
    group_amax<T><<<static_cast<unsigned>(tiles), kTileThreads, 0, stream>>>(p);
  } else if (desc.granularity == Granularity::kTensor) {
    if (p.args.num_partials == 0)
      p.args.num_partials =
          launch_partials<T>(x, p.vector_loads, p.args.workspace, num_multiprocessors, stream);
  }
  if (desc.granularity == Granularity::kRow) {
    const int64_t amaxes = x.rows + (is_grouped ? groups.count : 1) * x.cols;
    FP8CORE_CUDA(cudaMemsetAsync(p.args.workspace, 0, amaxes * sizeof(float), stream));
    directed_amax<T><<<static_cast<unsigned>(tiles), kTileThreads, 0, stream>>>(p);
  }
  if (desc.format == Format::kE4M3)
    launch_format<T, Format::kE4M3>(desc, p, static_cast<unsigned>(tiles), stream);
  else
    launch_format<T, Format::kE5M2>(desc, p, static_cast<unsigned>(tiles), stream);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
