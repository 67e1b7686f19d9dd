// The launch of an activation with a cast, and of the sums of its columns.
#include "../element.h"
#include "../sums/column_sums.h"
#include "activations.h"
#include "fused_from.h"
#include "sources.cuh"

namespace fp8core {
namespace {

template <InputType kInput, Family kFamily, typename Run>
void with_direction(const ActivationDesc& desc, const Run& run) {
  if (desc.is_backward)
    run(FusedActivations<kInput, kFamily, true>{});
  else
    run(FusedActivations<kInput, kFamily, false>{});
}

// Calls run(FusedActivations<...>{}) of what `desc` computes.
template <typename Run>
void with_fused(const ActivationDesc& desc, const Run& run) {
  with_type(desc.input, [&](auto type) {
    if constexpr (type() != InputType::kFloat32) {
      switch (family_of(desc.function)) {
        case Family::kSwish: return with_direction<type(), Family::kSwish>(desc, run);
        case Family::kGelu: return with_direction<type(), Family::kGelu>(desc, run);
        default: return with_direction<type(), Family::kOther>(desc, run);
      }
    }
  });
}

template <typename CastArguments>
ActivationSourceInputs source_inputs(const ActivationDesc& desc,
                                     const CastActivationArguments<CastArguments>& arguments) {
  const ActivationInputs& given = arguments.inputs;
  ActivationSourceInputs inputs;
  inputs.function = function_params(desc);
  inputs.x = given.x.data;
  inputs.stride = given.x.stride;
  inputs.grad = given.grad;
  inputs.grad_stride = given.grad_stride;
  inputs.tile_sums = arguments.tile_sums;
  return inputs;
}

template <typename CastDesc, typename CastArguments>
TileParams tile_params_of(const CastActivationDesc<CastDesc>& desc,
                          const CastActivationArguments<CastArguments>& arguments) {
  TileParams tile = tile_params(desc.cast, arguments.cast);
  tile.part_columns = columns_of(desc.activation, arguments.inputs.x);
  tile.tile_columns = static_cast<int>((tile.part_columns + kTile - 1) / kTile);
  return tile;
}

template <typename CastArguments>
void add_tile_sums(const CastActivationArguments<CastArguments>& arguments, cudaStream_t stream) {
  const Matrix& result = arguments.cast.x;
  if (arguments.sums != nullptr)
    launch_add_parts(arguments.tile_sums, num_tile_rows(result, {}), result.cols, arguments.sums,
                     stream);
}

}  // namespace

void launch_quantize_activation(const QuantizeActivationDesc& desc,
                                const QuantizeActivationArguments& arguments, cudaStream_t stream,
                                const CastSlots* second) {
  const DeviceGuard guard(desc.activation.device);
  TileParams tile = tile_params_of(desc, arguments);
  if (second != nullptr) tile.is_split = true, tile.second = *second;
  const ActivationSourceInputs inputs = source_inputs(desc.activation, arguments);
  with_fused(desc.activation, [&](auto fused) { fused.launch(desc, tile, inputs, stream); });
  add_tile_sums(arguments, stream);
}

void launch_quantize_activation(const QuantizeActivationMxfp8Desc& desc,
                                const QuantizeActivationMxfp8Arguments& arguments,
                                cudaStream_t stream) {
  const DeviceGuard guard(desc.activation.device);
  const TileParams tile = tile_params_of(desc, arguments);
  const ActivationSourceInputs inputs = source_inputs(desc.activation, arguments);
  const MxParams scales = mx_params(desc.cast, arguments.cast);
  with_fused(desc.activation, [&](auto fused) {
    fused.launch_mxfp8(desc.activation, tile, scales, inputs, stream);
  });
  add_tile_sums(arguments, stream);
}

void launch_quantize_activation(const QuantizeActivationNvfp4Desc& desc,
                                const QuantizeActivationNvfp4Arguments& arguments,
                                cudaStream_t stream) {
  const DeviceGuard guard(desc.activation.device);
  const ActivationSourceInputs inputs = source_inputs(desc.activation, arguments);
  const Nvfp4Params params = nvfp4_params(desc.cast, arguments.cast);
  with_fused(desc.activation,
             [&](auto fused) { fused.launch_nvfp4(desc.activation, params, inputs, stream); });
  add_tile_sums(arguments, stream);
}

}  // namespace fp8core
