// Casts whose scales are bytes: MXFP8 and NVFP4. Bit for bit what docs/numerics.md says.
//
// The scales of an operand [rows, k] lie as [ceil(k / bk), pitch] bytes, those of adjacent rows
// adjacent, `pitch` at least round_up(ceil(rows / br), 16): a thread of the cast holds several rows
// and stores their scales at once. arrange_scales brings them into cuBLASLt's order.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core {

// Null codes: that orientation is not wanted. `codes` as in QuantizeOutput, two a byte in NVFP4.
struct ByteScaled {
  std::uint8_t* codes;
  std::uint8_t* scales;
  std::int64_t pitch;
};

struct Mxfp8Desc {
  Format format;
  bool is_square;  // blocks of 32 x 32, else 1 x 32
  double target;   // what the amax of a block maps to
};

// One launch; an empty x launches nothing. `nonfinite` grows by the NaN and inf in x, or is null.
void quantize_mxfp8(const Mxfp8Desc& desc, const Matrix& x, const ByteScaled& rowwise,
                    const ByteScaled& columnwise, unsigned long long* nonfinite, int device,
                    cudaStream_t stream);

struct Nvfp4Desc {
  bool is_square;   // blocks of 16 x 16, else 1 x 16
  double target;    // what the amax of a block maps to
  bool transforms;  // columnwise: 16 rows at a time by diag(signs) H / 4
  bool row_stochastic, column_stochastic;
};

struct Nvfp4Arguments {
  Matrix x;
  ByteScaled rowwise, columnwise;
  float *row_global, *column_global;  // global_scale_inv of each orientation
  std::uint64_t seed, offset;         // of stochastic rounding
  float* workspace;                   // 2 * kMaxPartials floats
  unsigned long long* nonfinite;      // grows by the NaN and inf in x, or null
};

// Two launches; an empty x launches nothing. Throws where codes do not fill bytes, or rows the
// transform.
void quantize_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, int device,
                    cudaStream_t stream);

// The scales of one operand of a GEMM: where they are, and where cuBLASLt reads them.
struct ScaleTiles {
  const std::uint8_t* scales;             // [ceil(rows / rows_per_scale), blocks], any strides
  std::int64_t row_stride, block_stride;  // bytes
  std::int64_t rows, blocks;              // of the operand; blocks of k
  int rows_per_scale;                     // 1, or the rows of a square block
  const float* global_scale_inv;          // NVFP4, else null
  std::uint8_t* to;                       // tile_bytes(rows, blocks) bytes
};

// Bytes of the tiles of 128 rows x 4 scales that hold the scales of `rows` x `blocks`.
constexpr std::int64_t tile_bytes(std::int64_t rows, std::int64_t blocks) {
  return (rows + 127) / 128 * ((blocks + 3) / 4) * 512;
}

// What follows a's tiles where both operands have a global scale, in memory of the device, because
// nobody waits for it: alpha, the product of the two, and what beta may be.
struct GemmFactors {
  float alpha, zero, one;
};

// Both operands' scales into tiles, and GemmFactors behind those of a, in one launch.
void arrange_scales(const ScaleTiles& a, const ScaleTiles& b, int device, cudaStream_t stream);

}  // namespace fp8core
