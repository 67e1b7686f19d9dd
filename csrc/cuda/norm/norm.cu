// Launches of norms and of their gradients.
#include "../element.h"
#include "backward.cuh"
#include "forward.cuh"
#include "norms.h"
#include "norms_from.h"

namespace fp8core {
namespace {

// Rows of whole vectors of eight elements, each at a multiple of 16 bytes; or there are none.
bool rows_are_vectors(const void* data, int64_t cols, int64_t stride, InputType type) {
  return data == nullptr || reads_vectors(Matrix{data, 1, cols, stride}, type);
}

bool are_vectors(const Parameters& parameters) { return is_aligned(parameters.data, 16); }

}  // namespace

void launch_norm(const NormDesc& desc, const NormArguments& arguments, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const Matrix& x = arguments.x;
  NormParams p{};
  p.args = arguments;
  p.affine = {arguments.weight, arguments.bias, desc.zero_centered};
  p.output = desc.output;
  p.inverse_count = inverse_of(x.cols);
  p.eps = desc.eps;
  p.vectors = reads_vectors(x, desc.input) && are_vectors(arguments.weight) &&
              are_vectors(arguments.bias) &&
              rows_are_vectors(arguments.y, x.cols, x.cols, desc.output) &&
              rows_are_vectors(arguments.residual, x.cols, arguments.residual_stride, desc.input) &&
              rows_are_vectors(arguments.sum, x.cols, x.cols, desc.input);
  p.one_type = desc.output == desc.input && arguments.weight.type == desc.input &&
               (arguments.bias.data == nullptr || arguments.bias.type == desc.input);
  with_type(desc.input, [&](auto input) {
    NormsFrom<ElementOf<input()>>::norm(desc.kind, p, desc.device, stream);
  });
}

int count_backward_partials(const NormDesc& desc, std::int64_t rows, std::int64_t cols) {
  const DeviceGuard guard(desc.device);
  return with_type(desc.input, [&](auto input) {
    return NormsFrom<ElementOf<input()>>::backward_partials(desc.kind, rows, cols, desc.device);
  });
}

void launch_norm_backward(const NormDesc& desc, const NormBackwardArguments& arguments,
                          cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const Matrix& grad = arguments.grad;
  NormBackwardParams p{};
  p.args = arguments;
  p.affine = {arguments.weight, {}, desc.zero_centered};
  p.output = desc.output;
  p.inverse_count = inverse_of(grad.cols);
  p.vectors = reads_vectors(grad, desc.input) && are_vectors(arguments.weight) &&
              rows_are_vectors(arguments.x, grad.cols, arguments.x_stride, desc.input) &&
              rows_are_vectors(arguments.grad_x, grad.cols, grad.cols, desc.output) &&
              rows_are_vectors(arguments.addend, grad.cols, arguments.addend_stride, desc.output);
  with_type(desc.input, [&](auto input) {
    NormsFrom<ElementOf<input()>>::backward(desc.kind, p, desc.device, stream);
  });
}

}  // namespace fp8core
