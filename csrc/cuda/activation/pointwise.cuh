// The kernels of activations alone: by vectors of 8 elements, or one by one where rows do not begin
// at multiples of 16 bytes.
#pragma once

#include "../divisor.cuh"
#include "../quantize/numerics.cuh"
#include "functions.cuh"

namespace fp8core {

constexpr int kPointwiseThreads = 256;

struct PointwiseParams {
  FunctionParams function;
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  const void* grad = nullptr;
  std::int64_t grad_stride = 0;
  void* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t n = 0;       // columns of y; the second half of a gated row begins there
  std::uint32_t units = 0;  // vectors or elements of y
  Divisor per_row{1};       // units of a row
};

// Loads from one place of x, of grad and of the second half, computes, stores to one place or two.
template <typename In, typename Out, Family kFamily, bool kGated, bool kBackward>
struct Vectors {
  Eight<In> a, b, grad;
  std::int64_t to;

  __device__ void load(const PointwiseParams& p, std::uint32_t unit) {
    const std::uint32_t row = p.per_row.quotient(unit);
    const std::int64_t column = std::int64_t{8} * p.per_row.remainder(unit, row);
    const In* x = static_cast<const In*>(p.x) + row * p.x_stride + column;
    a.load_kept(x);
    if constexpr (kGated) b.load_kept(x + p.n);
    if constexpr (kBackward)
      grad.load_kept(static_cast<const In*>(p.grad) + row * p.grad_stride + column);
    to = row * p.out_stride + column;
  }
  static __device__ void floats(const Eight<In>& from, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = from[j];
  }
  __device__ void store(const PointwiseParams& p) const {
    Out* out = static_cast<Out*>(p.out) + to;
    float x[8], y[8];
    floats(a, x);
    if constexpr (kBackward && kGated) {
      float g[8], second[8], grad_second[8];
      floats(grad, g);
      floats(b, second);
      differentiate<kFamily>(p.function, g, x, second, y, grad_second);
      rounded<Out>(grad_second).store(out + p.n);
    } else if constexpr (kBackward) {
      float g[8];
      floats(grad, g);
      differentiate<kFamily>(p.function, g, x, y);
    } else if constexpr (kGated) {
      float second[8];
      floats(b, second);
      activate<kFamily>(p.function, x, second, y);
    } else {
      activate<kFamily>(p.function, x, y);
    }
    rounded<Out>(y).store(out);
  }
};

// A vector a thread: with two or four of them the kernels take up to a fifth longer.
template <typename In, typename Out, Family kFamily, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kPointwiseThreads)
    activation_vectors(const __grid_constant__ PointwiseParams p) {
  const std::uint32_t unit = blockIdx.x * kPointwiseThreads + threadIdx.x;
  if (unit >= p.units) return;
  Vectors<In, Out, kFamily, kGated, kBackward> vectors;
  vectors.load(p, unit);
  vectors.store(p);
}

template <typename In, typename Out, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kPointwiseThreads)
    activation_elements(const __grid_constant__ PointwiseParams p) {
  const std::uint32_t unit = blockIdx.x * kPointwiseThreads + threadIdx.x;
  if (unit >= p.units) return;
  const std::uint32_t row = p.per_row.quotient(unit), column = p.per_row.remainder(unit, row);
  const In* x = static_cast<const In*>(p.x) + row * p.x_stride + column;
  Out* out = static_cast<Out*>(p.out) + row * p.out_stride + column;
  const float a[1] = {static_cast<float>(*x)};
  float y[1], b[1], grad[1], grad_b[1];
  if constexpr (kGated) b[0] = static_cast<float>(x[p.n]);
  if constexpr (kBackward)
    grad[0] = static_cast<float>(static_cast<const In*>(p.grad)[row * p.grad_stride + column]);
  if constexpr (kBackward && kGated) {
    differentiate<Family::kAny>(p.function, grad, a, b, y, grad_b);
    out[p.n] = static_cast<Out>(grad_b[0]);
  } else if constexpr (kBackward) {
    differentiate<Family::kAny>(p.function, grad, a, y);
  } else if constexpr (kGated) {
    activate<Family::kAny>(p.function, a, b, y);
  } else {
    activate<Family::kAny>(p.function, a, y);
  }
  *out = static_cast<Out>(y[0]);
}

}  // namespace fp8core
