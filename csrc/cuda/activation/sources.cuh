// Activations and their derivatives as sources of a cast (quantize/source.cuh): computed in
// float32, as the kernels of pointwise.cuh do, and rounded to T before the cast unless Value is
// float.
//
// x and the gradient are read as vectors of 8 elements: their rows begin at multiples of 16 bytes,
// and a half of a gated row is a whole number of vectors.
#pragma once

#include "../quantize/source.cuh"
#include "functions.cuh"

namespace fp8core {

// The casts after a computation whose result is not rounded, and after one whose result is.
template <typename T, typename V>
constexpr bool takes_granularity(Granularity granularity) {
  if (std::is_same_v<V, float>) return granularity == Granularity::kDelayed;
  return granularity == Granularity::kTensor || granularity == Granularity::kRow ||
         granularity == Granularity::kVec128;
}

template <typename T>
__device__ void to_floats(const Eight<T>& from, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = from[j];
}

// Eight elements at a pointer, or zeros.
template <Reading kReading, typename T>
__device__ Eight<T> load_or_zero(const T* from, bool is_inside) {
  Eight<T> x;
  x.bits = make_uint4(0, 0, 0, 0);
  if (is_inside) {
    if constexpr (kReading == Reading::kAgain)
      x.load_kept(from);
    else
      x.load(from);
  }
  return x;
}

struct ActivationSourceInputs {
  FunctionParams function;
  const void* x = nullptr;
  std::int64_t stride = 0;
  const void* grad = nullptr;  // of a derivative, as grad_stride
  std::int64_t grad_stride = 0;
  float* tile_sums = nullptr;  // kSums: [rows of tiles, columns of the result]
};

// y [rows, n], from x [rows, n] or, gated, [rows, 2 n].
template <typename T, typename V, Family kFamily, bool kGated>
struct ActivationSource {
  using Value = V;
  using Inputs = ActivationSourceInputs;
  struct Row {
    Eight<T> a, b;
  };
  static constexpr int kParts = 1, kRows = kGated ? 2 : 4;
  static constexpr bool kSums = false;
  static constexpr int kBlocks = 3, kDirectedBlocks = 2;
  static constexpr Formats kFormats = Formats::kE4M3;
  static constexpr bool takes(Granularity granularity) {
    return takes_granularity<T, V>(granularity);
  }

  const Inputs& in;
  const T* from;
  int64_t half;  // elements from a value to its partner in the second half
  int rows;

  __device__ ActivationSource(const Inputs& in, const TileParams& p, const TileSpan& at, int ty,
                              int tx)
      : in(in), half(p.part_columns) {
    const int64_t row = at.row + ty * 8, column = at.column + tx * 8;
    from = static_cast<const T*>(in.x) + row * in.stride + column;
    rows = column < at.column_end ? left_before(at.load_end, row) : 0;
  }
  template <Reading kReading = Reading::kOnce, int kCount>
  __device__ void load(Row (&x)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const T* at = from + (first + i) * in.stride;
      const bool is_inside = first + i < rows;
      x[i].a = load_or_zero<kReading>(at, is_inside);
      if constexpr (kGated) x[i].b = load_or_zero<kReading>(at + half, is_inside);
    }
  }
  __device__ void values(const Row& x, Eight<V> (&result)[1]) const {
    float a[8], y[8];
    to_floats(x.a, a);
    if constexpr (kGated) {
      float b[8];
      to_floats(x.b, b);
      activate<kFamily>(in.function, a, b, y);
    } else {
      activate<kFamily>(in.function, a, y);
    }
    result[0] = rounded<V>(y);
  }
};

// The gradient of x, of its shape, from that of y [rows, n]. A gated one has two parts: the
// gradients of the halves.
template <typename T, typename V, Family kFamily, bool kGated, bool kHasSums>
struct ActivationBackwardSource {
  using Value = V;
  using Inputs = ActivationSourceInputs;
  struct Row {
    Eight<T> a, b, grad;
  };
  static constexpr int kParts = kGated ? 2 : 1, kRows = 2;
  static constexpr bool kSums = kHasSums;
  static constexpr int kBlocks = kGated ? 2 : 3, kDirectedBlocks = 2;
  static constexpr Formats kFormats = Formats::kShared;
  static constexpr bool takes(Granularity granularity) {
    const bool is_of_tensor =
        granularity == Granularity::kTensor || granularity == Granularity::kDelayed;
    if (kSums && !is_of_tensor) return false;  // the others' kernels add up on request
    return takes_granularity<T, V>(granularity) || (kGated && granularity == Granularity::kDelayed);
  }

  const Inputs& in;
  const T *from, *grad_from;
  int64_t half;
  int rows;

  __device__ ActivationBackwardSource(const Inputs& in, const TileParams& p, const TileSpan& at,
                                      int ty, int tx)
      : in(in), half(p.part_columns) {
    const int64_t row = at.row + ty * 8, column = at.column + tx * 8;
    from = static_cast<const T*>(in.x) + row * in.stride + column;
    grad_from = static_cast<const T*>(in.grad) + row * in.grad_stride + column;
    rows = column < at.column_end ? left_before(at.load_end, row) : 0;
  }
  template <Reading kReading = Reading::kOnce, int kCount>
  __device__ void load(Row (&x)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const T* at = from + (first + i) * in.stride;
      const bool is_inside = first + i < rows;
      x[i].a = load_or_zero<kReading>(at, is_inside);
      if constexpr (kGated) x[i].b = load_or_zero<kReading>(at + half, is_inside);
      x[i].grad = load_or_zero<kReading>(grad_from + (first + i) * in.grad_stride, is_inside);
    }
  }
  __device__ void values(const Row& x, Eight<V> (&result)[kParts]) const {
    float a[8], grad[8], grad_a[8];
    to_floats(x.a, a);
    to_floats(x.grad, grad);
    if constexpr (kGated) {
      float b[8], grad_b[8];
      to_floats(x.b, b);
      differentiate<kFamily>(in.function, grad, a, b, grad_a, grad_b);
      result[1] = rounded<V>(grad_b);
    } else {
      differentiate<kFamily>(in.function, grad, a, grad_a);
    }
    result[0] = rounded<V>(grad_a);
  }
};

}  // namespace fp8core
