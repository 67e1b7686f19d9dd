// Quantization of x [rows, cols] to codes [rows, cols] and, transposed, [cols, rows].
// Bit for bit what docs/numerics.md says; everything in float32.
#pragma once

#include <cstdint>
#include <string>

#include "fp8core/check.h"

namespace fp8core {

enum class InputType { kFloat32, kBFloat16, kFloat16 };
enum class Format { kE4M3, kE5M2 };

// What one scale covers, seen from the operand's own rows.
enum class Granularity {
  kDelayed,  // the tensor; the scale is handed in, the amax out
  kTensor,   // the tensor
  kRow,      // a row
  kVec128,   // 128 elements of a row
  kBlock128  // 128 x 128
};

struct Matrix {
  const void* data;
  std::int64_t rows, cols, stride;  // stride: elements between rows; columns are adjacent
  InputType type;
};

// scale = target / max(amax, epsilon); `largest` where that overflows, 1 where amax is 0 or inf;
// rounded down to a power of two on request.
struct ScaleRule {
  float target;
  float epsilon;
  float largest;
  bool power_of_two;
};

struct QuantizeDesc {
  Granularity granularity;
  Format format;
  ScaleRule rule;
};

// Null codes: that orientation is not wanted. scale_inv: see ScaleMode in gemm.h for the layouts;
// `pitch` is the number of floats between its rows.
struct QuantizeOutput {
  std::uint8_t* codes;
  float* scale_inv;
  std::int64_t pitch;
};

struct QuantizeArguments {
  Matrix x;
  QuantizeOutput rowwise, columnwise;
  const float* scale;  // kDelayed
  float* amax_out;     // kDelayed, or null: amax_out = max(amax_out, amax(x)); NaN is ignored
  float* workspace;    // kTensor: kMaxPartials floats; kRow: rows + cols floats
};

constexpr int kMaxPartials = 1024;

// Launches: kDelayed, kVec128 and kBlock128 one, kTensor two, kRow two and a memset.
// An empty x launches nothing.
void quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments, int device,
              cudaStream_t stream);

// amax_out[0] = amax(x), in two launches; `workspace` has kMaxPartials floats.
void amax(const Matrix& x, float* amax_out, float* workspace, int device, cudaStream_t stream);

}  // namespace fp8core
