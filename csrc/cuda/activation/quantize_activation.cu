// The launch of an activation with a cast, and of the sums of its columns.
#include "../element.h"
#include "../sums/column_sums.h"
#include "activations.h"
#include "fused_from.h"
#include "sources.cuh"

namespace fp8core {
namespace {

template <InputType kInput, Family kFamily>
void launch_direction(const QuantizeActivationDesc& desc, const TileParams& tile,
                      const ActivationSourceInputs& inputs, cudaStream_t stream) {
  if (desc.activation.is_backward)
    FusedActivations<kInput, kFamily, true>::launch(desc, tile, inputs, stream);
  else
    FusedActivations<kInput, kFamily, false>::launch(desc, tile, inputs, stream);
}

template <InputType kInput>
void launch_family(const QuantizeActivationDesc& desc, const TileParams& tile,
                   const ActivationSourceInputs& inputs, cudaStream_t stream) {
  switch (family_of(desc.activation.function)) {
    case Family::kSwish:
      return launch_direction<kInput, Family::kSwish>(desc, tile, inputs, stream);
    case Family::kGelu: return launch_direction<kInput, Family::kGelu>(desc, tile, inputs, stream);
    default: return launch_direction<kInput, Family::kOther>(desc, tile, inputs, stream);
  }
}

}  // namespace

void launch_quantize_activation(const QuantizeActivationDesc& desc,
                                const QuantizeActivationArguments& arguments, cudaStream_t stream) {
  const ActivationDesc& function = desc.activation;
  const ActivationInputs& given = arguments.inputs;
  const Matrix& result = arguments.cast.x;
  const DeviceGuard guard(function.device);
  TileParams tile = tile_params(desc.cast, arguments.cast);
  tile.part_columns = columns_of(function, given.x);
  tile.tile_columns = static_cast<int>((tile.part_columns + kTile - 1) / kTile);
  ActivationSourceInputs inputs;
  inputs.function = function_params(function);
  inputs.x = given.x.data;
  inputs.stride = given.x.stride;
  inputs.grad = given.grad;
  inputs.grad_stride = given.grad_stride;
  inputs.tile_sums = arguments.sums == nullptr ? nullptr : arguments.tile_sums;
  with_type(function.input, [&](auto type) {
    if constexpr (type() != InputType::kFloat32) launch_family<type()>(desc, tile, inputs, stream);
  });
  if (arguments.sums != nullptr)
    launch_add_parts(arguments.tile_sums, num_tile_rows(result, {}), result.cols, arguments.sums,
                     stream);
}

}  // namespace fp8core
