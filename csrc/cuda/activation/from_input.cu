// Activations of one type of input. backends/cuda/build.py compiles this file once for each
// InputType, side by side: FP8CORE_INPUT names its enumerator.
#include "../element.h"
#include "activations_from.h"
#include "pointwise.cuh"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kFloat32, kBFloat16 or kFloat16"
#endif

namespace fp8core {
namespace {

template <typename In, typename Out, bool kGated, bool kBackward>
void launch_kernel(const ActivationDesc& desc, const PointwiseParams& p, bool is_of_vectors,
                   cudaStream_t stream) {
  const unsigned blocks = (p.units + kPointwiseThreads - 1) / kPointwiseThreads;
  if (!is_of_vectors) {
    activation_elements<In, Out, kGated, kBackward><<<blocks, kPointwiseThreads, 0, stream>>>(p);
    return;
  }
  switch (family_of(desc.function)) {
    case Family::kSwish:
      activation_vectors<In, Out, Family::kSwish, kGated, kBackward>
          <<<blocks, kPointwiseThreads, 0, stream>>>(p);
      break;
    case Family::kGelu:
      activation_vectors<In, Out, Family::kGelu, kGated, kBackward>
          <<<blocks, kPointwiseThreads, 0, stream>>>(p);
      break;
    default:
      activation_vectors<In, Out, Family::kOther, kGated, kBackward>
          <<<blocks, kPointwiseThreads, 0, stream>>>(p);
  }
}

}  // namespace

template <InputType kInput>
void ActivationsFrom<kInput>::launch(const ActivationDesc& desc, const PointwiseParams& p,
                                     bool is_of_vectors, cudaStream_t stream) {
  with_type(desc.output, [&](auto output) {
    using In = ElementOf<kInput>;
    using Out = ElementOf<output()>;
    if (desc.is_gated && desc.is_backward)
      launch_kernel<In, Out, true, true>(desc, p, is_of_vectors, stream);
    else if (desc.is_gated)
      launch_kernel<In, Out, true, false>(desc, p, is_of_vectors, stream);
    else if (desc.is_backward)
      launch_kernel<In, Out, false, true>(desc, p, is_of_vectors, stream);
    else
      launch_kernel<In, Out, false, false>(desc, p, is_of_vectors, stream);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

template struct ActivationsFrom<InputType::FP8CORE_INPUT>;

}  // namespace fp8core
