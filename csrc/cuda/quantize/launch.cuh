// From a descriptor to a kernel: for any source, and for matrices of one input type.
#pragma once

#include <algorithm>

#include "casts_from.h"
#include "tile.cuh"
#include "vectors.h"
#include "walk_launch.cuh"

namespace fp8core {

template <typename Source, typename Encoding, Granularity G>
void launch_granularity(const CastParams<Source>& p, int device, cudaStream_t stream) {
  if constexpr (!Source::takes(G))
    throw std::invalid_argument("quantize: no kernel casts the results of this operation so");
  else if constexpr (G == Granularity::kVec128 || G == Granularity::kRow)
    launch_walk<directed_tile<Source, Encoding, G>>(p, device, stream);
  else
    launch_walk<uniform_tile<Source, Encoding, G>>(p, device, stream);
}

template <typename Source, typename Encoding>
void launch_encoding(Granularity granularity, const CastParams<Source>& p, int device,
                     cudaStream_t stream) {
  switch (granularity) {
    case Granularity::kDelayed:
      return launch_granularity<Source, Encoding, Granularity::kDelayed>(p, device, stream);
    case Granularity::kTensor:
      return launch_granularity<Source, Encoding, Granularity::kTensor>(p, device, stream);
    case Granularity::kBlock128:
      return launch_granularity<Source, Encoding, Granularity::kBlock128>(p, device, stream);
    case Granularity::kVec128:
      return launch_granularity<Source, Encoding, Granularity::kVec128>(p, device, stream);
    case Granularity::kRow:
      return launch_granularity<Source, Encoding, Granularity::kRow>(p, device, stream);
  }
}

// Casts the elements of a source, whose amaxes are in the workspace where the scales need them.
template <typename Source>
void launch_cast(const QuantizeDesc& desc, const CastParams<Source>& p, cudaStream_t stream) {
  const bool is_e4m3 = desc.format == Format::kE4M3;
  if constexpr (Source::kFormats == Formats::kShared) {
    launch_encoding<Source, EitherEncoder>(desc.granularity, p, desc.device, stream);
  } else if (is_e4m3) {
    launch_encoding<Source, Encoder<Format::kE4M3>>(desc.granularity, p, desc.device, stream);
  } else if constexpr (Source::kFormats == Formats::kEach) {
    launch_encoding<Source, Encoder<Format::kE5M2>>(desc.granularity, p, desc.device, stream);
  } else {
    throw std::invalid_argument("quantize: the results of this operation are cast to e4m3 alone");
  }
  FP8CORE_CUDA(cudaGetLastError());
}

template <InputType kInput>
int CastsFrom<kInput>::partial_amaxes(const Matrix& x, float* partials, int num_multiprocessors,
                                      cudaStream_t stream) {
  const int64_t elements = x.rows * x.cols;
  const int64_t wanted = (elements + 8 * kAmaxThreads - 1) / (8 * kAmaxThreads);
  const int blocks = static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>({wanted, 3 * num_multiprocessors, kMaxPartials})));
  const bool is_flat = x.stride == x.cols && elements % 8 == 0;
  amax_partials<Element><<<blocks, kAmaxThreads, 0, stream>>>(
      static_cast<const Element*>(x.data), is_flat ? 1 : x.rows, is_flat ? elements : x.cols,
      x.stride, reads_vectors(x, kInput), partials);
  return blocks;
}

template <InputType kInput>
void CastsFrom<kInput>::amaxes(Granularity granularity, const TileParams& p, cudaStream_t stream) {
  const Matrix& x = p.args.x;
  const Groups& groups = p.args.groups;
  const auto tiles = static_cast<unsigned>(num_tiles(x, groups));
  const std::size_t bytes = num_amaxes(granularity, x, groups) * sizeof(float);
  FP8CORE_CUDA(cudaMemsetAsync(p.args.workspace, 0, bytes, stream));
  if (tiles == 0) return;
  if (granularity == Granularity::kRow)
    directed_amax<MatrixSource<Element>><<<tiles, kTileThreads, 0, stream>>>({p, {}, tiles});
  else
    group_amax<Element><<<tiles, kTileThreads, 0, stream>>>(p);
}

template <InputType kInput>
void CastsFrom<kInput>::quantize(const QuantizeDesc& desc, TileParams p, float* tile_sums,
                                 int num_multiprocessors, cudaStream_t stream) {
  const Matrix& x = p.args.x;
  const Groups& groups = p.args.groups;
  const auto tiles = static_cast<unsigned>(num_tiles(x, groups));
  const bool is_of_tensor = desc.granularity == Granularity::kTensor;
  if (p.args.num_partials == 0) {
    if (is_of_tensor && groups.offsets == nullptr)
      p.args.num_partials = partial_amaxes(x, p.args.workspace, num_multiprocessors, stream);
    else if (is_of_tensor || desc.granularity == Granularity::kRow)
      amaxes(desc.granularity, p, stream);
  }
  if constexpr (kInput != InputType::kFloat32) {
    if (tile_sums != nullptr)
      return launch_cast<SummedMatrixSource<Element>>(desc, {p, {tile_sums}, tiles}, stream);
  }
  launch_cast<MatrixSource<Element>>(desc, {p, {}, tiles}, stream);
}

}  // namespace fp8core
