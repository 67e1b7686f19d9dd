// The launches of activations with casts that one compilation of fused.cu has.
#pragma once

#include "../quantize/mx_params.h"
#include "../quantize/nvfp4_params.h"
#include "functions.cuh"

namespace fp8core {

struct ActivationSourceInputs;

// Of one type of input, one family of functions and one direction.
template <InputType kInput, Family kFamily, bool kBackward>
struct FusedActivations {
  static void launch(const QuantizeActivationDesc& desc, const TileParams& tile,
                     const ActivationSourceInputs& inputs, cudaStream_t stream);
  static void launch_mxfp8(const ActivationDesc& desc, const TileParams& tile,
                           const MxParams& scales, const ActivationSourceInputs& inputs,
                           cudaStream_t stream);
  static void launch_nvfp4(const ActivationDesc& desc, const Nvfp4Params& params,
                           const ActivationSourceInputs& inputs, cudaStream_t stream);
};

}  // namespace fp8core
