// Activations and their derivatives as strips of an NVFP4 cast: computed as in pointwise.cuh, and
// rounded to T. Rows of x and of the gradient are read as in sources.cuh, four columns at a time,
// so that a strip is in one half of a result that has two.
#pragma once

#include "../quantize/nvfp4_strip.cuh"
#include "sources.cuh"

namespace fp8core {

template <typename T, Family kFamily, bool kGated, bool kBackward>
struct ActivationStrips {
  using Value = T;
  using Inputs = ActivationSourceInputs;
  static constexpr int kBlocks = 2;
  static constexpr bool kHasTwoParts = kGated && kBackward;

  static __device__ void load_four(const T* from, bool is_inside, float (&v)[4]) {
    uint2 bits = make_uint2(0, 0);
    if (is_inside) bits = __ldcs(reinterpret_cast<const uint2*>(from));
    Strip<T> one;
    one.bits[0] = bits;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = one.at(0, j);
  }

  static __device__ void load(Strip<T>& result, const Nvfp4Params& p, const Inputs& in,
                              const StripOrigin& at) {
    const int64_t n = kHasTwoParts ? p.x.cols / 2 : p.x.cols;
    const bool is_second = kHasTwoParts && at.column >= n;
    const int64_t column = is_second ? at.column - n : at.column;
    const T* from = static_cast<const T*>(in.x) + at.row * in.stride + column;
    const T* grad_from = static_cast<const T*>(in.grad) + at.row * in.grad_stride + column;
    const int rows = at.column < p.x.cols ? left_before(p.x.rows, at.row) : 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const bool is_inside = i < rows;
      float a[4], b[4], grad[4], y[4], grad_b[4];
      load_four(from + i * in.stride, is_inside, a);
      if constexpr (kGated) load_four(from + i * in.stride + n, is_inside, b);
      if constexpr (kBackward) load_four(grad_from + i * in.grad_stride, is_inside, grad);
      if constexpr (kHasTwoParts) {
        differentiate<kFamily>(in.function, grad, a, b, y, grad_b);
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = is_second ? grad_b[j] : y[j];
      } else if constexpr (kBackward) {
        differentiate<kFamily>(in.function, grad, a, y);
      } else if constexpr (kGated) {
        activate<kFamily>(in.function, a, b, y);
      } else {
        activate<kFamily>(in.function, a, y);
      }
      result.bits[i] = make_uint2(rounded_pair(y[0], y[1], T{}), rounded_pair(y[2], y[3], T{}));
    }
  }
};

}  // namespace fp8core
