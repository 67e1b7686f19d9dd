// Steps of Adam: the tensors of all parameters in a few launches, in place, in float32.
#pragma once

#include <vector>

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

// A launch takes kParametersPerStep parameters.
constexpr int kParametersPerStep = 48;

// The tensors of one parameter, each contiguous, of `size` elements: first and second are the
// averages, extra is the master, or null.
struct StepTensors {
  const void* grad = nullptr;
  void *param = nullptr, *first = nullptr, *second = nullptr, *extra = nullptr;
  std::int64_t size = 0;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(grad, param, first, second, extra, size); }
};

enum class MasterKind { kNone, kFloat32, kRemainder };

struct AdamDesc {
  InputType param, grad, state;
  MasterKind master;
  bool is_decoupled;
  int device;
};

// A number that the host knows, or, where `on_device` is not null, one element there.
struct AdamNumbers {
  float lr = 0.0f, inv_scale = 1.0f;
  const float *lr_on_device = nullptr, *inv_scale_on_device = nullptr;
  // 4 bytes that stop the step unless they are 0 or -0; null for none.
  const std::uint32_t* found_inf = nullptr;
  double beta1 = 0.0, beta2 = 0.0;
  float eps = 0.0f, weight_decay = 0.0f;
  bool corrects_bias = true;
  double step_number = 1.0;
  const std::int32_t* step_number_on_device = nullptr;

  static constexpr int kOptional = 0;
  auto fields() {
    return std::tie(lr, inv_scale, lr_on_device, inv_scale_on_device, found_inf, beta1, beta2, eps,
                    weight_decay, corrects_bias, step_number, step_number_on_device);
  }
};

void adam(const AdamDesc& desc, const std::vector<StepTensors>& tensors, const AdamNumbers& numbers,
          StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
