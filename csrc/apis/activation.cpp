// Activations: the arguments are checked, then launched.
#include "fp8core/activation.h"

#include "../cuda/activation/activations.h"
#include "check_cast.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;

void check(const ActivationDesc& desc, const ActivationInputs& inputs) {
  const Matrix& x = inputs.x;
  check(x);
  FP8CORE_CHECK(!desc.is_gated || x.cols % 2 == 0, "activation: x has ", x.cols,
                " columns; a gated activation takes two halves");
  FP8CORE_CHECK(x.cols < kMostColumns, "activation: x has ", x.cols,
                " columns; expected less than ", kMostColumns);
  if (!desc.is_backward || is_empty(x)) return;
  const std::int64_t n = columns_of(desc, x);
  FP8CORE_CHECK(inputs.grad_stride >= n, "activation: ", inputs.grad_stride,
                " elements between the rows of grad; expected at least ", n);
  FP8CORE_CHECK_ADDRESS(inputs.grad, "grad [", x.rows, ", ", n, "]");
}

}  // namespace

void activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                StreamHandle stream) {
  check(desc, arguments.inputs);
  if (is_empty(arguments.inputs.x)) return;
  FP8CORE_CHECK_ADDRESS(arguments.out, "activation: the result");
  launch_activation(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
