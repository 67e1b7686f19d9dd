// Activations and their derivatives: float32 arithmetic, rounded once to the result's type.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core {

// f of one value. A gated activation is f(a) * b of the two halves a, b of a row.
enum class ActivationFunction {
  kSwish,  // x sigmoid(beta x)
  kGelu,   // its tanh approximation
  kSigmoid,
  kRelu,
  kSquaredRelu,
  kClampedSwish,  // gated: a at most limit, b within +-limit; f(a) * (b + offset)
};

struct ActivationDesc {
  ActivationFunction function;
  bool is_gated;
  bool is_backward;
  float beta;           // kSwish, kClampedSwish
  float limit, offset;  // kClampedSwish
  InputType input;      // of x, and of the gradient
  InputType output;
  int device;
};

// x [rows, n], or [rows, 2 n] where the activation is gated. Backward alone takes grad [rows, n],
// whose columns are adjacent.
struct ActivationInputs {
  Matrix x;
  const void* grad = nullptr;
  std::int64_t grad_stride = 0;  // elements between rows

  auto fields() { return std::tie(x, grad, grad_stride); }
};

// out: y [rows, n], or the gradient of x, of its shape; contiguous.
struct ActivationArguments {
  ActivationInputs inputs;
  void* out = nullptr;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(inputs, out); }
};

// One launch; an empty x launches nothing. Throws where a gated activation takes an odd number of
// columns.
void activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                StreamHandle stream);

}  // namespace fp8core
