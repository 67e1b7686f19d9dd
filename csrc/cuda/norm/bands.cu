// Norms with casts in bands. backends/cuda/build.py compiles this file once for each type of input
// of 16 bits, side by side: FP8CORE_INPUT names its enumerator.
#include "../element.h"
#include "../quantize/tile.cuh"
#include "../residency.h"
#include "bands.cuh"
#include "fused_from.h"
#include "norms.h"
#include "teams.h"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kBFloat16 or kFloat16"
#endif

namespace fp8core {
namespace {

// Dynamic shared memory: so much that two blocks fit a multiprocessor, whatever a row's length.
constexpr std::size_t kBandBytes = 92 * 1024;

template <typename T>
struct Tag {
  using Type = T;
};

// Launches a kernel whose blocks are all on the device at once. False where shared memory does not
// hold the rows that a tile owns, or the device fewer blocks than a band has tiles; then nothing is
// launched.
template <auto kKernel, typename Source>
bool launch_together(const CastParams<Source>& p, int device, cudaStream_t stream) {
  if (walk_bytes<Source> + BandMemory::bytes(p.inputs.num_chunks, p.inputs.most_rows) > kBandBytes)
    return false;
  const auto most =
      static_cast<unsigned>(resident_blocks<kKernel>(kTileThreads / 32, kBandBytes, device));
  const auto tiles_of_band = static_cast<unsigned>(p.tile.tile_columns);
  if (most < tiles_of_band) return false;
  const std::size_t bytes = p.tile.args.x.rows * sizeof(float);
  if (p.inputs.mean != nullptr)  // filled with kNotWritten
    FP8CORE_CUDA(cudaMemsetAsync(p.inputs.mean, 0xFF, bytes, stream));
  FP8CORE_CUDA(cudaMemsetAsync(p.inputs.rstd, 0xFF, bytes, stream));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::min(p.tiles, most));
  config.blockDim = dim3(kTileThreads);
  config.dynamicSmemBytes = kBandBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  FP8CORE_CUDA(cudaLaunchKernelEx(&config, kKernel, p));
  return true;
}

template <typename T, bool kLayerNorm>
bool launch_kind(const QuantizeNormDesc& desc, const TileParams& tile, const BandInputs& inputs,
                 cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(num_tiles(tile.args.x, {}));
  const int device = desc.norm.device;
  const auto launch = [&](auto source, auto granularity) {
    using Source = typename decltype(source)::Type;
    constexpr Granularity G = decltype(granularity)::value;
    const CastParams<Source> p = {tile, inputs, tiles};
    if constexpr (G == Granularity::kDelayed)
      return launch_together<uniform_tile<Source, EitherEncoder, G>>(p, device, stream);
    else
      return launch_together<directed_tile<Source, EitherEncoder, G>>(p, device, stream);
  };
  using Delayed = std::integral_constant<Granularity, Granularity::kDelayed>;
  using Vec128 = std::integral_constant<Granularity, Granularity::kVec128>;
  if (desc.cast.granularity == Granularity::kVec128)
    return launch(Tag<BandSource<T, T, kLayerNorm>>{}, Vec128{});
  if (desc.norm.output == InputType::kFloat32)
    return launch(Tag<BandSource<T, float, kLayerNorm>>{}, Delayed{});
  return launch(Tag<BandSource<T, T, kLayerNorm>>{}, Delayed{});
}

}  // namespace

template <typename T>
bool BandsFrom<T>::launch(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                          const TileParams& tile, cudaStream_t stream) {
  const Matrix& x = tile.args.x;
  const int64_t columns = tile.tile_columns;
  BandInputs inputs;
  inputs.affine = {arguments.weight, arguments.bias, desc.norm.zero_centered};
  inputs.mean = arguments.mean;
  inputs.rstd = arguments.rstd;
  inputs.inverse_count = inverse_of(x.cols);
  inputs.eps = desc.norm.eps;
  inputs.num_chunks = num_chunks(x.cols);
  inputs.chunks = Divisor(static_cast<std::uint32_t>(inputs.num_chunks));
  inputs.most_rows = static_cast<int>(ceil_div(kTile, columns));
  return desc.norm.kind == NormKind::kLayerNorm ? launch_kind<T, true>(desc, tile, inputs, stream)
                                                : launch_kind<T, false>(desc, tile, inputs, stream);
}

template struct BandsFrom<ElementOf<InputType::FP8CORE_INPUT>>;

}  // namespace fp8core
