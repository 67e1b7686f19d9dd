// The launches of casts, of arguments that apis/ has checked, and the sizes that both count in.
#pragma once

#include "fp8core/microscaling.h"
#include "fp8core/quantize.h"

namespace fp8core {

constexpr int kTile = 128;                    // rows and columns that a block of threads casts
constexpr int kMxBlock = 32, kFp4Block = 16;  // elements under one scale, along k

// Tiles that cover x. In groups no tile covers rows of two groups, and this is the most there can
// be.
inline std::int64_t num_tile_rows(const Matrix& x, const Groups& groups) {
  return groups.offsets == nullptr ? (x.rows + kTile - 1) / kTile
                                   : x.rows / kTile + groups.count + 1;
}
inline std::int64_t num_tile_columns(const Matrix& x) { return (x.cols + kTile - 1) / kTile; }
inline std::int64_t num_tiles(const Matrix& x, const Groups& groups) {
  return num_tile_rows(x, groups) * num_tile_columns(x);
}

// Bytes between the rows of the columnwise codes.
inline std::int64_t pitch_of_columns(const QuantizeArguments& arguments) {
  return arguments.column_pitch == 0 ? arguments.x.rows : arguments.column_pitch;
}

// Rows that the columnwise operand is cast from; those behind x are zeros.
template <typename Arguments>
std::int64_t rows_of_columns(const Arguments& arguments) {
  return arguments.column_rows == 0 ? arguments.x.rows : arguments.column_rows;
}

void launch_group_offsets(const GroupOffsets& arguments, int device, cudaStream_t stream);
void launch_quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments,
                     cudaStream_t stream);
void launch_quantize_and_sum(const QuantizeDesc& desc, const QuantizeAndSumArguments& arguments,
                             cudaStream_t stream);
void launch_amax(const AmaxDesc& desc, const AmaxArguments& arguments, cudaStream_t stream);
int launch_partial_amaxes(const AmaxDesc& desc, const AmaxArguments& arguments,
                          cudaStream_t stream);
void launch_mxfp8(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments, cudaStream_t stream);
void launch_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, cudaStream_t stream);

}  // namespace fp8core
