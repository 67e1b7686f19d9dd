// Casts whose scales are bytes: MXFP8 and NVFP4. docs/numerics.md defines every bit of the results.
//
// The scales of an operand [rows, k] lie as [ceil(k / bk), pitch] bytes, those of adjacent rows
// adjacent, `pitch` at least round_up(ceil(rows / br), 16): a thread of the cast holds several rows
// and stores their scales at once. arrange_scales brings them into cuBLASLt's order.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

// Null codes: that orientation is not wanted. `codes` as in QuantizeOutput, two a byte in NVFP4.
struct ByteScaled {
  std::uint8_t* codes = nullptr;
  std::uint8_t* scales = nullptr;
  std::int64_t pitch = 0;

  auto fields() { return std::tie(codes, scales, pitch); }
};

struct Mxfp8Desc {
  Format format;
  InputType input;
  bool is_square;  // blocks of 32 x 32, else 1 x 32
  double target;   // what the amax of a block maps to
  int device;
};

struct Mxfp8Arguments {
  Matrix x;
  ByteScaled rowwise, columnwise;
  unsigned long long* nonfinite = nullptr;  // grows by the NaN and inf in x, or null
  // Optional from here on.
  std::int64_t column_rows = 0;  // of the columnwise operand: x.rows (0 means that), and zeros

  static constexpr int kOptional = 1;
  auto fields() { return std::tie(x, rowwise, columnwise, nonfinite, column_rows); }
};

// One launch; an empty x launches nothing.
void quantize_mxfp8(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments, StreamHandle stream);

struct Nvfp4Desc {
  InputType input;
  bool is_square;   // blocks of 16 x 16, else 1 x 16
  double target;    // what the amax of a block maps to
  bool transforms;  // columnwise: 16 rows at a time by diag(signs) H / 4
  bool row_stochastic, column_stochastic;
  int device;
};

struct Nvfp4Arguments {
  Matrix x;
  ByteScaled rowwise, columnwise;
  float *row_global = nullptr, *column_global = nullptr;  // global_scale_inv of each orientation
  unsigned long long* nonfinite = nullptr;                // grows by the NaN and inf in x, or null
  float* workspace = nullptr;                             // 2 * kMaxPartials floats
  std::int64_t seed = 0, offset = 0;                      // of stochastic rounding, as 64 bits each
  // Optional from here on.
  std::int64_t column_rows = 0;  // of the columnwise operand: x.rows (0 means that), and zeros

  static constexpr int kOptional = 1;
  auto fields() {
    return std::tie(x, rowwise, columnwise, row_global, column_global, nonfinite, workspace, seed,
                    offset, column_rows);
  }
};

// Two launches; an empty x launches nothing. Throws where codes do not fill bytes, or rows the
// transform.
void quantize_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, StreamHandle stream);

// The scales of one operand of a GEMM: where they are, and where cuBLASLt reads them.
struct ScaleTiles {
  const std::uint8_t* scales = nullptr;  // [ceil(rows / rows_per_scale), blocks], any strides
  std::int64_t row_stride = 0, block_stride = 0;  // bytes
  std::int64_t rows = 0, blocks = 0;              // of the operand; blocks of k
  int rows_per_scale = 0;                         // 1, or the rows of a square block
  const float* global_scale_inv = nullptr;        // NVFP4, else null
  std::uint8_t* to = nullptr;                     // tile_bytes(rows, blocks) bytes

  auto fields() {
    return std::tie(scales, row_stride, block_stride, rows, blocks, rows_per_scale,
                    global_scale_inv, to);
  }
};

// Bytes of the tiles of 128 rows x 4 scales that hold the scales of `rows` x `blocks`.
constexpr std::int64_t tile_bytes(std::int64_t rows, std::int64_t blocks) {
  return (rows + 127) / 128 * ((blocks + 3) / 4) * 512;
}

// Follows a's tiles where both operands have a global scale: alpha, the product of the two scales,
// and the values of beta. It lies in the device's memory, since the host does not wait for alpha.
struct GemmFactors {
  float alpha, zero, one;
};

struct ArrangeScalesArguments {
  ScaleTiles a, b;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(a, b); }
};

// Both operands' scales into tiles, and GemmFactors behind those of a, in one launch.
void arrange_scales(const ArrangeScalesArguments& arguments, int device, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
