// The launch of an activation: by vectors where addresses allow, in parts that 31 bits can count.
#include <algorithm>

#include "../element.h"
#include "activations.h"
#include "activations_from.h"
#include "pointwise.cuh"

namespace fp8core {
namespace {

constexpr std::int64_t kMostUnits = std::int64_t{1} << 30;  // of a launch

std::int64_t size_of(InputType type) { return type == InputType::kFloat32 ? 4 : 2; }

}  // namespace

FunctionParams function_params(const ActivationDesc& desc) {
  constexpr double kLog2E = 1.4426950408889634;
  return {desc.function, desc.beta, static_cast<float>(-desc.beta * kLog2E), desc.limit,
          desc.offset};
}

void launch_activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                       cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const Matrix& x = arguments.inputs.x;
  const bool is_of_vectors = reads_vectors(desc, arguments.inputs) && is_aligned(arguments.out, 16);
  PointwiseParams p;
  p.function = function_params(desc);
  p.n = columns_of(desc, x);
  p.x_stride = x.stride;
  p.grad_stride = arguments.inputs.grad_stride;
  p.out_stride = desc.is_backward ? x.cols : p.n;
  const std::int64_t per_row = is_of_vectors ? p.n / 8 : p.n;
  p.per_row = Divisor(static_cast<std::uint32_t>(per_row));
  const std::int64_t rows_at_once = std::max<std::int64_t>(1, kMostUnits / per_row);
  for (std::int64_t row = 0; row < x.rows; row += rows_at_once) {
    const auto at = [&](const void* from, std::int64_t stride, InputType type) {
      return reinterpret_cast<std::uintptr_t>(from) + row * stride * size_of(type);
    };
    p.x = reinterpret_cast<const void*>(at(x.data, x.stride, desc.input));
    p.grad = reinterpret_cast<const void*>(at(arguments.inputs.grad, p.grad_stride, desc.input));
    p.out = reinterpret_cast<void*>(at(arguments.out, p.out_stride, desc.output));
    p.units = static_cast<std::uint32_t>(std::min(rows_at_once, x.rows - row) * per_row);
    with_type(desc.input, [&](auto input) {
      ActivationsFrom<input()>::launch(desc, p, is_of_vectors, stream);
    });
  }
}

}  // namespace fp8core
