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

// Groups of rows, each a tensor of its own; where they end is known on the device alone. Operands
// then have one scale a group (kDelayed, kTensor; kRow columnwise: [groups, pitch]), or one for
// every 128 rows of each group (kVec128 columnwise, kBlock128), of which there is room for
// rows / 128 + groups. Columnwise codes begin at a multiple of 32 in each group, with zeros between
// and behind: rows of 32 * (rows / 32 + groups) codes. Scales beyond the last group are 1.
struct Groups {
  const std::int64_t* offsets = nullptr;  // [count + 1], null: x is one tensor
  std::int64_t count = 0;
  std::int64_t scale_stride = 0, amax_stride = 0;  // floats between the entries of two groups
};

struct QuantizeArguments {
  Matrix x;
  QuantizeOutput rowwise, columnwise;
  const float* scale;  // kDelayed
  float* amax_out;     // kDelayed, or null: amax_out = max(amax_out, amax(x)); NaN is ignored
  float* workspace;    // kTensor: kMaxPartials floats, or one a group; kRow: rows + cols floats, or
                       // rows + groups * cols
  std::int64_t column_pitch;  // bytes between the rows of the columnwise codes; in groups also
                              // their number
  Groups groups;
  // kTensor: that many amaxes are in the workspace already, of a tensor that x is a part of; 0:
  // those of x are taken first.
  int num_partials = 0;
  // Grows by the number of NaN and inf in x, those of rows of no group left out; or null.
  unsigned long long* nonfinite = nullptr;
};

constexpr int kMaxPartials = 1024;

// Launches: kDelayed, kVec128 and kBlock128 one, kTensor two (in groups also a memset), kRow two
// and a memset. An empty x launches nothing, but for the scales of groups that are all empty.
void quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments, int device,
              cudaStream_t stream);

// Two tensors in one launch, or three for kTensor: of the same granularity, kDelayed or kTensor, in
// e4m3, from the same input type. Neither is in groups.
void quantize_pair(const QuantizeDesc& desc, const QuantizeArguments& arguments,
                   const QuantizeDesc& other_desc, const QuantizeArguments& other, int device,
                   cudaStream_t stream);

// Writes amaxes whose largest is amax(x), and returns how many; `workspace` has kMaxPartials
// floats.
int partial_amaxes(const Matrix& x, float* workspace, int device, cudaStream_t stream);

// amax_out[0] = amax(x), in two launches; `workspace` has kMaxPartials floats.
void amax(const Matrix& x, float* amax_out, float* workspace, int device, cudaStream_t stream);

}  // namespace fp8core
