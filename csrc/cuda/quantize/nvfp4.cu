// The launches of NVFP4 casts.
#include "casts_from.h"
#include "nvfp4_launch.cuh"

namespace fp8core {

void launch_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  Nvfp4Params params = nvfp4_params(desc, arguments);
  const int multiprocessors = num_multiprocessors(desc.device);
  with_input(desc.input, [&](auto casts) {
    using Strips = MatrixStrips<typename decltype(casts)::Element>;
    if (params.transforms)
      launch_transformed_amax<Strips>(params, {}, multiprocessors, stream);
    else
      params.num_partials =
          casts.partial_amaxes(params.x, params.partials, multiprocessors, stream);
    launch_strips<Strips>(params, {}, multiprocessors, stream);
  });
}

}  // namespace fp8core
