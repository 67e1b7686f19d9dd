// Norms and their gradients: the arguments are checked, then launched.
#include "fp8core/norm.h"

#include "../cuda/norm/norms.h"
#include "../cuda/quantize/vectors.h"
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

void check(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments) {
  const Matrix& x = arguments.cast.x;
  const InputType output = desc.norm.output;
  const Granularity granularity = desc.cast.granularity;
  check(x);
  check_columns(x);
  check_results(desc.cast, arguments.cast);
  FP8CORE_CHECK(desc.norm.input != InputType::kFloat32 && output == desc.cast.input &&
                    (output == desc.norm.input ||
                     (output == InputType::kFloat32 && granularity == Granularity::kDelayed)),
                "quantize_norm reads bfloat16 and float16, and rounds to the same before the cast "
                "or, where the scale is delayed, not at all");
  FP8CORE_CHECK(granularity != Granularity::kBlock128,
                "quantize_norm: no scales of 128 x 128 elements");
  FP8CORE_CHECK(arguments.cast.groups.offsets == nullptr && arguments.cast.num_partials == 0,
                "quantize_norm takes neither groups nor amaxes");
  if (is_empty(x)) return;
  FP8CORE_CHECK_ADDRESS(arguments.weight.data, "quantize_norm: the weight");
  FP8CORE_CHECK_ADDRESS(arguments.rstd, "quantize_norm: rstd");
  if (desc.norm.kind == NormKind::kLayerNorm)
    FP8CORE_CHECK_ADDRESS(arguments.mean, "quantize_norm: the mean");
  else
    FP8CORE_CHECK(arguments.bias.data == nullptr, "quantize_norm: an RMSNorm has no bias");
  FP8CORE_CHECK(reads_vectors(x, desc.norm.input) && is_aligned(arguments.weight.data, 16) &&
                    is_aligned(arguments.bias.data, 16) &&
                    is_aligned(arguments.cast.rowwise.codes, 8),
                "quantize_norm: rows of x, parameters and rowwise codes begin at multiples of 16, "
                "16 and 8 bytes, and rows are a multiple of 8 columns");
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

void quantize_norm(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                   StreamHandle stream) {
  check(desc, arguments);
  const Matrix& x = arguments.cast.x;
  if (is_empty(x)) return;
  check_grid("quantize_norm", num_tiles(x, {}));
  launch_quantize_norm(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
