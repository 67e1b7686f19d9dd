// Steps of Adam: the tensors are checked, then launched.
#include "fp8core/step.h"

#include "../cuda/step/step.h"

namespace fp8core {

void adam(const AdamDesc& desc, const std::vector<StepTensors>& tensors, const AdamNumbers& numbers,
          StreamHandle stream) {
  for (const StepTensors& one : tensors) {
    FP8CORE_CHECK(one.size >= 0, "adam: a parameter of ", one.size, " elements");
    if (one.size == 0) continue;
    FP8CORE_CHECK_ADDRESS(one.grad, "adam: a gradient");
    FP8CORE_CHECK_ADDRESS(one.param, "adam: a parameter");
    FP8CORE_CHECK_ADDRESS(one.first, "adam: an average");
    FP8CORE_CHECK_ADDRESS(one.second, "adam: a second average");
    if (desc.master != MasterKind::kNone) FP8CORE_CHECK_ADDRESS(one.extra, "adam: a master");
  }
  launch_adam(desc, tensors, numbers, as_stream(stream));
}

}  // namespace fp8core
