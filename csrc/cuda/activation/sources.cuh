// Activations and their derivatives as sources of a cast (quantize/source.cuh): computed in
// float32, as the kernels of pointwise.cuh do, and rounded to T before the cast unless Value is
// float.
//
// x and the gradient are read as vectors of 8 elements: their rows begin at multiples of 16 bytes,
// and a half of a gated row is a whole number of vectors.
#pragma once

#include "../copies.cuh"
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
template <typename T>
__device__ Eight<T> load_or_zero(const T* from, bool is_inside) {
  Eight<T> x;
  x.bits = make_uint4(0, 0, 0, 0);
  if (is_inside) x.load(from);
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

// Where the inputs of a thread's eight rows are.
template <typename T, bool kBackward>
struct ActivationOrigin {
  const T* x = nullptr;
  const T* grad = nullptr;  // kBackward
  int rows = 0;             // how many are left in x from the first on; none if the columns are not

  ActivationOrigin() = default;
  __device__ ActivationOrigin(const ActivationSourceInputs& in, const TileParams&,
                              const TileSpan& at, int ty, int tx) {
    const int64_t row = at.row + ty * 8, column = at.column + tx * 8;
    x = static_cast<const T*>(in.x) + row * in.stride + column;
    if constexpr (kBackward) grad = static_cast<const T*>(in.grad) + row * in.grad_stride + column;
    rows = column < at.column_end ? left_before(at.load_end, row) : 0;
  }
};

// The inputs of eight elements of y: a, the partner b in the second half of a gated row, and the
// gradient of y; those that there are.
template <typename T, bool kGated, bool kBackward>
struct ActivationRow {
  static constexpr int kVectors = 1 + (kGated ? 1 : 0) + (kBackward ? 1 : 0);
  Eight<T> vectors[kVectors];

  // Calls take(vector, where its row `i` is); `half`: elements from a to b.
  template <typename Take>
  static __device__ void for_vectors(const ActivationOrigin<T, kBackward>& origin,
                                     const ActivationSourceInputs& in, int64_t half, int i,
                                     const Take& take) {
    const T* a = origin.x + i * in.stride;
    take(0, a);
    if constexpr (kGated) take(1, a + half);
    if constexpr (kBackward) take(kVectors - 1, origin.grad + i * in.grad_stride);
  }
  __device__ const Eight<T>& a() const { return vectors[0]; }
  __device__ const Eight<T>& b() const { return vectors[1]; }
  __device__ const Eight<T>& grad() const { return vectors[kVectors - 1]; }
};

// What both directions share: how inputs are copied and loaded.
template <typename T, bool kGated, bool kBackward, int kNumStages>
struct ActivationInputsOf {
  using Inputs = ActivationSourceInputs;
  using Row = ActivationRow<T, kGated, kBackward>;
  using Origin = ActivationOrigin<T, kBackward>;
  static constexpr int kRows = 2, kStages = kNumStages;
  struct Stage {
    uint4 vectors[kRows][Row::kVectors][kTileThreads];
  };
  const Inputs& in;
  const Origin origin;
  int64_t half;  // elements from a value to its partner in the second half

  __device__ ActivationInputsOf(const Inputs& in, const TileParams& p, const TileSpan& at, int ty,
                                int tx)
      : in(in), origin(in, p, at, ty, tx), half(p.part_columns) {}

  static __device__ void copy(Stage& to, Origin& from, const Inputs& in, const TileParams& p,
                              int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Row::for_vectors(from, in, p.part_columns, 0, [&](int k, const T* at) {
        copy_16_bytes(&to.vectors[i][k][threadIdx.x], at, first + i < from.rows);
      });
      from.x += in.stride;
      if constexpr (kBackward) from.grad += in.grad_stride;
    }
  }
  __device__ void read(Row (&rows)[kRows], const Stage& from, int) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int k = 0; k < Row::kVectors; ++k)
        rows[i].vectors[k].bits = from.vectors[i][k][threadIdx.x];
  }
  template <int kCount>
  __device__ void load(Row (&rows)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      Row::for_vectors(origin, in, half, first + i, [&](int k, const T* at) {
        rows[i].vectors[k] = load_or_zero(at, first + i < origin.rows);
      });
  }
};

// y [rows, n], from x [rows, n] or, gated, [rows, 2 n].
template <typename T, typename V, Family kFamily, bool kGated>
struct ActivationSource : ActivationInputsOf<T, kGated, false, kGated ? 3 : 4> {
  using Value = V;
  using Base = ActivationInputsOf<T, kGated, false, kGated ? 3 : 4>;
  using typename Base::Row;
  static constexpr int kParts = 1;
  static constexpr bool kSums = false, kReadBefore = false;
  static constexpr int kBlocks = 3, kDirectedBlocks = 3;
  static constexpr Formats kFormats = Formats::kE4M3;
  static constexpr bool takes(Granularity granularity) {
    return takes_granularity<T, V>(granularity);
  }
  using Base::Base;

  __device__ void values(const Row& x, Eight<V> (&result)[1]) const {
    float a[8], y[8];
    to_floats(x.a(), a);
    if constexpr (kGated) {
      float b[8];
      to_floats(x.b(), b);
      activate<kFamily>(this->in.function, a, b, y);
    } else {
      activate<kFamily>(this->in.function, a, y);
    }
    result[0] = rounded<V>(y);
  }
};

// The gradient of x, of its shape, from that of y [rows, n]. A gated one has two parts: the
// gradients of the halves.
template <typename T, typename V, Family kFamily, bool kGated, bool kHasSums>
struct ActivationBackwardSource : ActivationInputsOf<T, kGated, true, 3> {
  using Value = V;
  using Base = ActivationInputsOf<T, kGated, true, 3>;
  using typename Base::Row;
  static constexpr int kParts = kGated ? 2 : 1;
  static constexpr bool kSums = kHasSums, kReadBefore = false;
  static constexpr int kBlocks = kGated ? 2 : 3, kDirectedBlocks = kGated ? 2 : 3;
  static constexpr Formats kFormats = Formats::kShared;
  static constexpr bool takes(Granularity granularity) {
    const bool is_of_tensor =
        granularity == Granularity::kTensor || granularity == Granularity::kDelayed;
    if (kSums && !is_of_tensor) return false;  // the others' kernels add up on request
    return takes_granularity<T, V>(granularity) || (kGated && granularity == Granularity::kDelayed);
  }
  using Base::Base;

  __device__ void values(const Row& x, Eight<V> (&result)[kParts]) const {
    float a[8], grad[8], grad_a[8];
    to_floats(x.a(), a);
    to_floats(x.grad(), grad);
    if constexpr (kGated) {
      float b[8], grad_b[8];
      to_floats(x.b(), b);
      differentiate<kFamily>(this->in.function, grad, a, b, grad_a, grad_b);
      result[1] = rounded<V>(grad_b);
    } else {
      differentiate<kFamily>(this->in.function, grad, a, grad_a);
    }
    result[0] = rounded<V>(grad_a);
  }
};

}  // namespace fp8core
