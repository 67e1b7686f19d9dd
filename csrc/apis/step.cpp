// Steps of optimizers: the tensors are checked, then launched.
#include "fp8core/step.h"

#include "../cuda/step/step.h"

namespace fp8core {
namespace {

void check_tensors(const char* entry, const std::vector<StepTensors>& tensors, bool has_first,
                   bool has_second, bool has_extra) {
  for (const StepTensors& one : tensors) {
    FP8CORE_CHECK(one.size >= 0, entry, ": a parameter of ", one.size, " elements");
    if (one.size == 0) continue;
    FP8CORE_CHECK_ADDRESS(one.grad, entry, ": a gradient");
    FP8CORE_CHECK_ADDRESS(one.param, entry, ": a parameter");
    if (has_first) FP8CORE_CHECK_ADDRESS(one.first, entry, ": an average, or momentum");
    if (has_second) FP8CORE_CHECK_ADDRESS(one.second, entry, ": a second average");
    if (has_extra) FP8CORE_CHECK_ADDRESS(one.extra, entry, ": a master");
  }
}

}  // namespace

void adam(const AdamDesc& desc, const std::vector<StepTensors>& tensors, const AdamNumbers& numbers,
          StreamHandle stream) {
  const bool has_master = desc.master != MasterKind::kNone;
  check_tensors("adam", tensors, /*has_first=*/true, /*has_second=*/true, has_master);
  launch_adam(desc, tensors, numbers, as_stream(stream));
}

void sgd(const SgdDesc& desc, const std::vector<StepTensors>& tensors, const SgdNumbers& numbers,
         StreamHandle stream) {
  const bool has_momentum = numbers.momentum != 0.0f;
  check_tensors("sgd", tensors, has_momentum, /*has_second=*/false, /*has_extra=*/false);
  launch_sgd(desc, tensors, numbers, as_stream(stream));
}

}  // namespace fp8core
