// Activations and their derivatives: float32 arithmetic, rounded once to the result's type.
#pragma once

#include "fp8core/microscaling.h"

namespace fp8core FP8CORE_EXPORTED {

// f of one value. A gated activation is f(a) * b of the two halves a, b of a row.
enum class ActivationFunction {
  kSwish,  // x sigmoid(beta x)
  kGelu,   // its tanh approximation
  kErfGelu,
  kSigmoid,
  kRelu,
  kSquaredRelu,
  kClampedSwish,  // gated: a at most limit, b within +-limit; f(a) * (b + offset)
};

struct ActivationDesc {
  ActivationFunction function;
  bool is_gated;
  bool is_backward;
  float beta;           // kSwish, kClampedSwish
  float limit, offset;  // kClampedSwish
  InputType input;      // of x, and of the gradient
  InputType output;
  int device;
};

// x [rows, n], or [rows, 2 n] where the activation is gated. Backward alone takes grad [rows, n],
// whose columns are adjacent.
struct ActivationInputs {
  Matrix x;
  const void* grad = nullptr;
  std::int64_t grad_stride = 0;  // elements between rows

  auto fields() { return std::tie(x, grad, grad_stride); }
};

// out: y [rows, n], or the gradient of x, of its shape; contiguous.
struct ActivationArguments {
  ActivationInputs inputs;
  void* out = nullptr;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(inputs, out); }
};

// One launch; an empty x launches nothing. Throws where a gated activation takes an odd number of
// columns.
void activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                StreamHandle stream);

// An activation, or its derivative, and the cast of its result in one pass. The result is rounded
// to the activation's output type before the cast, which is that of x, or float32: not at all.
template <typename CastDesc>
struct CastActivationDesc {
  ActivationDesc activation;
  CastDesc cast;

  // Of the result.
  std::int64_t tile_sums_floats(std::int64_t rows, std::int64_t cols) const {
    return fp8core::tile_sums_floats(rows, cols);
  }
};
using QuantizeActivationDesc = CastActivationDesc<QuantizeDesc>;
using QuantizeActivationMxfp8Desc = CastActivationDesc<Mxfp8Desc>;
using QuantizeActivationNvfp4Desc = CastActivationDesc<Nvfp4Desc>;

// The x of `cast` has no data, but the size of the result. No groups, no amaxes that are given.
template <typename CastArguments>
struct CastActivationArguments {
  ActivationInputs inputs;
  // [columns], of the result before the cast; null: none, or the tile_sums of a part of it alone.
  float* sums = nullptr;
  float* tile_sums = nullptr;  // tile_sums_floats, or null
  CastArguments cast;

  static constexpr int kOptional = CastArguments::kOptional;
  auto fields() { return std::tie(inputs, sums, tile_sums, cast); }
};
using QuantizeActivationArguments = CastActivationArguments<QuantizeArguments>;
using QuantizeActivationMxfp8Arguments = CastActivationArguments<Mxfp8Arguments>;
using QuantizeActivationNvfp4Arguments = CastActivationArguments<Nvfp4Arguments>;

// Bit for bit `activation` and `quantize`. Reads bfloat16 and float16, as vectors: rows of x and
// grad begin at multiples of 16 bytes, and n is a multiple of 8; of a block where the gradient of a
// gated activation is cast in rows of blocks (128 for kVec128, 32 for MXFP8). kDelayed without
// rounding or for the gradient of a gated activation; kTensor, kRow, kVec128 and MXFP8 after
// rounding. Forward gives e4m3 alone.
//
// Launches: as many as the cast, which reads x twice where its scales need amaxes first; and one
// for sums, which are added in a fixed order. An empty x launches nothing.
void quantize_activation(const QuantizeActivationDesc& desc,
                         const QuantizeActivationArguments& arguments, StreamHandle stream);
// The gradient of a gated activation, whose halves are tensors of their own: those of `both` are
// the first half's scale, amax and count, and `second` has those of the other. Codes, scales of
// blocks and sums lie as those of one tensor. kDelayed, kTensor and kVec128.
struct QuantizeHalvesArguments {
  CastSlots second;
  QuantizeActivationArguments both;

  static constexpr int kOptional = QuantizeActivationArguments::kOptional;
  auto fields() { return std::tie(second, both); }
};
void quantize_halves(const QuantizeActivationDesc& desc, const QuantizeHalvesArguments& arguments,
                     StreamHandle stream);
void quantize_activation_mxfp8(const QuantizeActivationMxfp8Desc& desc,
                               const QuantizeActivationMxfp8Arguments& arguments,
                               StreamHandle stream);
void quantize_activation_nvfp4(const QuantizeActivationNvfp4Desc& desc,
                               const QuantizeActivationNvfp4Arguments& arguments,
                               StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
