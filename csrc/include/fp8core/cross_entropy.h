// Cross entropy of logits x [rows, cols], and its gradient, in float32.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

struct CrossEntropyDesc {
  InputType input;
  float label_smoothing;
  std::int64_t ignore_index;
  int device;
};

// Targets are not trusted: one that is no column is no address. One launch.
struct CrossEntropyArguments {
  Matrix x;
  const std::int64_t* target = nullptr;  // [rows]
  std::int64_t target_stride = 1;
  float *loss = nullptr, *largest = nullptr, *log_sum = nullptr;  // [rows]

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(x, target, target_stride, loss, largest, log_sum); }
};

void cross_entropy(const CrossEntropyDesc& desc, const CrossEntropyArguments& arguments,
                   StreamHandle stream);

// grad_x [rows, cols], contiguous, of a grad [rows] of any stride, 0 for one value of all rows.
struct CrossEntropyBackwardArguments {
  Matrix x;
  const std::int64_t* target = nullptr;
  std::int64_t target_stride = 1;
  const float *largest = nullptr, *log_sum = nullptr;  // [rows], contiguous
  const float* grad = nullptr;
  std::int64_t grad_stride = 1;
  void* grad_x = nullptr;

  static constexpr int kOptional = 0;
  auto fields() {
    return std::tie(x, target, target_stride, largest, log_sum, grad, grad_stride, grad_x);
  }
};

void cross_entropy_backward(const CrossEntropyDesc& desc,
                            const CrossEntropyBackwardArguments& arguments, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
