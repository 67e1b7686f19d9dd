// Norms and their gradients: the arguments are checked, then launched.
#include "fp8core/norm.h"

#include "../cuda/norm/norms.h"
#include "check_cast.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;  // they are counted in ints

void check_rows(const char* name, const Matrix& x, const void* data, std::int64_t stride) {
  FP8CORE_CHECK(stride >= x.cols, name, " has ", stride,
                " elements between rows; expected at least ", x.cols);
  FP8CORE_CHECK_ADDRESS(data, name, " [", x.rows, ", ", x.cols, "]");
}

void check_columns(const Matrix& x) {
  FP8CORE_CHECK(x.cols < kMostColumns, "norm: rows of ", x.cols, " elements; expected less than ",
                kMostColumns);
}

}  // namespace

void norm(const NormDesc& desc, const NormArguments& arguments, StreamHandle stream) {
  const Matrix& x = arguments.x;
  check(x);
  check_columns(x);
  if (is_empty(x)) return;
  FP8CORE_CHECK_ADDRESS(arguments.weight.data, "norm: the weight");
  FP8CORE_CHECK_ADDRESS(arguments.y, "norm: y");
  FP8CORE_CHECK_ADDRESS(arguments.rstd, "norm: rstd");
  if (desc.kind == NormKind::kLayerNorm)
    FP8CORE_CHECK_ADDRESS(arguments.mean, "norm: the mean");
  else
    FP8CORE_CHECK(arguments.bias.data == nullptr, "norm: an RMSNorm has no bias");
  if (arguments.residual != nullptr || arguments.sum != nullptr) {
    check_rows("norm: the residual", x, arguments.residual, arguments.residual_stride);
    FP8CORE_CHECK_ADDRESS(arguments.sum, "norm: the sum");
  }
  launch_norm(desc, arguments, as_stream(stream));
}

int norm_backward_partials(const NormDesc& desc, std::int64_t rows, std::int64_t cols) {
  FP8CORE_CHECK(rows > 0 && cols > 0 && cols < kMostColumns, "norm_backward_partials: ", rows,
                " x ", cols, "; expected at least one element");
  return count_backward_partials(desc, rows, cols);
}

void norm_backward(const NormDesc& desc, const NormBackwardArguments& arguments,
                   StreamHandle stream) {
  const Matrix& grad = arguments.grad;
  check(grad);
  check_columns(grad);
  if (is_empty(grad)) return;
  check_rows("norm_backward: x", grad, arguments.x, arguments.x_stride);
  FP8CORE_CHECK_ADDRESS(arguments.weight.data, "norm_backward: the weight");
  FP8CORE_CHECK_ADDRESS(arguments.rstd, "norm_backward: rstd");
  FP8CORE_CHECK_ADDRESS(arguments.grad_x, "norm_backward: grad_x");
  FP8CORE_CHECK_ADDRESS(arguments.grad_weight, "norm_backward: grad_weight");
  FP8CORE_CHECK_ADDRESS(arguments.workspace, "norm_backward: the workspace");
  if (desc.kind == NormKind::kLayerNorm) {
    FP8CORE_CHECK_ADDRESS(arguments.mean, "norm_backward: the mean");
    FP8CORE_CHECK_ADDRESS(arguments.grad_bias, "norm_backward: grad_bias");
  }
  if (arguments.addend != nullptr)
    check_rows("norm_backward: the addend", grad, arguments.addend, arguments.addend_stride);
  launch_norm_backward(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
