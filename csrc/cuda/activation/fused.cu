// Activations with casts. backends/cuda/build.py compiles this file once for each type of input,
// family of functions and direction, side by side.
#include <algorithm>

#include "../element.h"
#include "../quantize/launch.cuh"
#include "../quantize/mx.cuh"
#include "../quantize/nvfp4_launch.cuh"
#include "fused_from.h"
#include "sources.cuh"
#include "strips.cuh"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kBFloat16 or kFloat16"
#endif
#ifndef FP8CORE_FAMILY
#error "compile with -DFP8CORE_FAMILY=kSwish, kGelu or kOther"
#endif
#ifndef FP8CORE_BACKWARD
#error "compile with -DFP8CORE_BACKWARD=true or false"
#endif

namespace fp8core {
namespace {

// Writes the amaxes that the scales follow from, where they do not follow from their tiles.
template <typename Source>
void launch_amaxes(const QuantizeDesc& desc, CastParams<Source>& p, cudaStream_t stream) {
  QuantizeArguments& args = p.tile.args;
  if (desc.granularity == Granularity::kTensor) {
    const unsigned blocks = blocks_of_walk<tile_partials<Source>>(p, desc.device);
    args.num_partials = static_cast<int>(std::min<unsigned>(blocks, kMaxPartials));
    tile_partials<Source><<<args.num_partials, kTileThreads, walk_bytes<Source>, stream>>>(p);
  } else if (desc.granularity == Granularity::kRow) {
    const std::size_t bytes = num_amaxes(desc.granularity, args.x, {}) * sizeof(float);
    FP8CORE_CUDA(cudaMemsetAsync(args.workspace, 0, bytes, stream));
    launch_walk<directed_amax<Source>>(p, desc.device, stream);
  }
}

inline unsigned num_tiles(const TileParams& tile) {
  return static_cast<unsigned>(num_tile_rows(tile.args.x, {}) * tile.tile_columns);
}

template <typename T, typename V, Family kFamily, bool kGated, bool kBackward>
using SourceOf =
    std::conditional_t<kBackward, ActivationBackwardSource<T, V, kFamily, kGated, false>,
                       ActivationSource<T, V, kFamily, kGated>>;

template <typename T, typename V, Family kFamily, bool kGated, bool kBackward>
void launch_sources(const QuantizeDesc& desc, TileParams tile, const ActivationSourceInputs& inputs,
                    cudaStream_t stream) {
  const unsigned tiles = num_tiles(tile);
  using Source = SourceOf<T, V, kFamily, kGated, kBackward>;
  CastParams<Source> p = {tile, inputs, tiles};
  if constexpr (!std::is_same_v<V, float>) launch_amaxes(desc, p, stream);
  if constexpr (kBackward) {
    using Summed = ActivationBackwardSource<T, V, kFamily, kGated, true>;
    if (inputs.tile_sums != nullptr && Summed::takes(desc.granularity)) {
      launch_cast<Summed>(desc, {p.tile, inputs, tiles}, stream);
      return;
    }
  }
  launch_cast<Source>(desc, p, stream);
}

template <typename T, Family kFamily, bool kGated, bool kBackward>
void launch_rounding(const QuantizeActivationDesc& desc, const TileParams& tile,
                     const ActivationSourceInputs& inputs, cudaStream_t stream) {
  if constexpr (!(kGated && kBackward)) {  // which is rounded under every recipe
    if (desc.activation.output == InputType::kFloat32)
      return launch_sources<T, float, kFamily, kGated, kBackward>(desc.cast, tile, inputs, stream);
  }
  launch_sources<T, T, kFamily, kGated, kBackward>(desc.cast, tile, inputs, stream);
}

template <typename T, Family kFamily, bool kGated, bool kBackward>
void launch_mx(int device, const TileParams& tile, const MxParams& scales,
               const ActivationSourceInputs& inputs, cudaStream_t stream) {
  using Source = SourceOf<T, T, kFamily, kGated, kBackward>;
  using Encoding = std::conditional_t<Source::kFormats == Formats::kShared, EitherEncoder,
                                      Encoder<Format::kE4M3>>;
  const CastParams<Source> p = {tile, inputs, num_tiles(tile)};
  launch_walk<mx_tile<Source, Encoding>>(p, device, stream, scales);
  FP8CORE_CUDA(cudaGetLastError());
}

template <typename T, Family kFamily, bool kGated, bool kBackward>
void launch_fp4(const ActivationDesc& desc, Nvfp4Params params,
                const ActivationSourceInputs& inputs, cudaStream_t stream) {
  using Strips = ActivationStrips<T, kFamily, kGated, kBackward>;
  const int multiprocessors = num_multiprocessors(desc.device);
  if (params.transforms)
    launch_transformed_amax<Strips>(params, inputs, multiprocessors, stream);
  else
    launch_strip_partials<Strips>(params, inputs, multiprocessors, stream);
  launch_strips<Strips>(params, inputs, multiprocessors, stream);
}

}  // namespace

template <InputType kInput, Family kFamily, bool kBackward>
void FusedActivations<kInput, kFamily, kBackward>::launch(const QuantizeActivationDesc& desc,
                                                          const TileParams& tile,
                                                          const ActivationSourceInputs& inputs,
                                                          cudaStream_t stream) {
  using T = ElementOf<kInput>;
  if (desc.activation.is_gated)
    launch_rounding<T, kFamily, true, kBackward>(desc, tile, inputs, stream);
  else
    launch_rounding<T, kFamily, false, kBackward>(desc, tile, inputs, stream);
}

template <InputType kInput, Family kFamily, bool kBackward>
void FusedActivations<kInput, kFamily, kBackward>::launch_mxfp8(
    const ActivationDesc& desc, const TileParams& tile, const MxParams& scales,
    const ActivationSourceInputs& inputs, cudaStream_t stream) {
  using T = ElementOf<kInput>;
  if (desc.is_gated)
    launch_mx<T, kFamily, true, kBackward>(desc.device, tile, scales, inputs, stream);
  else
    launch_mx<T, kFamily, false, kBackward>(desc.device, tile, scales, inputs, stream);
}

template <InputType kInput, Family kFamily, bool kBackward>
void FusedActivations<kInput, kFamily, kBackward>::launch_nvfp4(
    const ActivationDesc& desc, const Nvfp4Params& params, const ActivationSourceInputs& inputs,
    cudaStream_t stream) {
  using T = ElementOf<kInput>;
  if (desc.is_gated)
    launch_fp4<T, kFamily, true, kBackward>(desc, params, inputs, stream);
  else
    launch_fp4<T, kFamily, false, kBackward>(desc, params, inputs, stream);
}

template struct FusedActivations<InputType::FP8CORE_INPUT, Family::FP8CORE_FAMILY,
                                 FP8CORE_BACKWARD>;

}  // namespace fp8core
