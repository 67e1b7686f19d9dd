// LayerNorm and RMSNorm of the rows of x [rows, n], alone or of a sum, and their gradients. All
// arithmetic is float32, rounded once; docs/numerics.md has the formulas.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

enum class NormKind { kLayerNorm, kRmsNorm };

struct NormDesc {
  NormKind kind;
  bool zero_centered;  // gamma is 1 + weight
  float eps;
  InputType input;   // of x, a residual and their sum; of x and the gradients in backward
  InputType output;  // of y; of grad_x in backward
  int device;
};

// A vector [n] of parameters, in any type.
struct Parameters {
  const void* data = nullptr;
  InputType type = InputType::kFloat32;

  auto fields() { return std::tie(data, type); }
};

struct NormArguments {
  Matrix x;
  Parameters weight, bias;  // a null bias adds nothing; RMSNorm has none
  void* y = nullptr;        // [rows, n]
  float* mean = nullptr;    // [rows], LayerNorm alone
  float* rstd = nullptr;    // [rows]

  // Optional from here on. With a residual, x + residual is rounded to the input type, written to
  // `sum` [rows, n], and normalized.
  const void* residual = nullptr;
  std::int64_t residual_stride = 0;
  void* sum = nullptr;

  static constexpr int kOptional = 3;
  auto fields() { return std::tie(x, weight, bias, y, mean, rstd, residual, residual_stride, sum); }
};

// One launch. Statistics follow one order of additions (cuda/norm/statistics.cuh), so a row has the
// same bits whatever rows are beside it.
void norm(const NormDesc& desc, const NormArguments& arguments, StreamHandle stream);

struct NormBackwardArguments {
  Matrix grad;  // of y
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  Parameters weight;
  const float* mean = nullptr;  // [rows], LayerNorm alone
  const float* rstd = nullptr;  // [rows]
  void* grad_x = nullptr;       // [rows, n]
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;  // LayerNorm alone
  float* workspace = nullptr;  // [backward_partials, 1, or 2 for LayerNorm, n]

  // Optional from here on: a gradient [rows, n] of the output's type that is added to grad_x, which
  // is rounded before and after.
  const void* addend = nullptr;
  std::int64_t addend_stride = 0;

  static constexpr int kOptional = 2;
  auto fields() {
    return std::tie(grad, x, x_stride, weight, mean, rstd, grad_x, grad_weight, grad_bias,
                    workspace, addend, addend_stride);
  }
};

// Into how many partial sums over rows the gradients of the parameters are split: it follows from
// the sizes and the device alone, and so do their bits.
int norm_backward_partials(const NormDesc& desc, std::int64_t rows, std::int64_t cols);

// Two launches, three for very long rows.
void norm_backward(const NormDesc& desc, const NormBackwardArguments& arguments,
                   StreamHandle stream);

// How one pass over x is divided, for measurements: by default that follows from the number of
// columns. All give the same bits.
struct PanelChoice {
  int rows = 0;         // that a cluster of blocks takes at once: 32 or 64, for kVec128 128; or 0
  int threads = 256;    // of a block; for kVec128 also 512
  int cluster = 1;      // blocks
  int slots_ahead = 0;  // 1: part of the next rows is loaded meanwhile
};

// A norm and the cast of its result, which is rounded to the norm's output type in between: to x's
// type, or float32, which is not at all.
struct QuantizeNormDesc {
  NormDesc norm;
  QuantizeDesc cast;
  PanelChoice panel;
};

struct QuantizeNormArguments {
  Parameters weight, bias;
  float* mean = nullptr;   // [rows], LayerNorm alone
  float* rstd = nullptr;   // [rows]
  QuantizeArguments cast;  // no groups, no amaxes that are given

  static constexpr int kOptional = QuantizeArguments::kOptional;
  auto fields() { return std::tie(weight, bias, mean, rstd, cast); }
};

// Bit for bit `norm` and `quantize`. Reads bfloat16 and float16, as vectors: rows of x and the
// parameters begin at multiples of 16 bytes, and rows are a multiple of 8 columns. kDelayed with or
// without rounding; kTensor, kRow and kVec128 after rounding.
//
// Launches: one for kDelayed with e4m3 and up to 8192 columns, which reads x once; two for other
// kDelayed, kTensor and kVec128, three for kRow: these read x twice, and rows of at most
// kMostTwicePassed columns. An empty x launches nothing.
constexpr std::int64_t kMostTwicePassed = 16384;

void quantize_norm(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                   StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
