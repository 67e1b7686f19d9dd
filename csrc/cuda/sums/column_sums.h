// The launch of column sums, and that of adding the sums of rows of tiles, which casts of gradients
// compute as well.
//
// The order is the same everywhere. In a tile of 128 rows eight adjacent rows are added one after
// the other, then each two of these sixteen sums, then the eight pairs one after the other; at last
// the rows of tiles are added as launch_add_parts says.
#pragma once

#include "../quantize/casts.h"
#include "fp8core/column_sums.h"

namespace fp8core {

inline std::int64_t num_row_tiles(std::int64_t rows) { return (rows + kTile - 1) / kTile; }

// So few rows of tiles one block of threads adds as fast as several and a second launch.
constexpr int kFewTiles = 2;

// Of arguments that have been checked, with at least one element.
void launch_column_sums(const ColumnSumsDesc& desc, const ColumnSumsArguments& arguments,
                        cudaStream_t stream);

// sums [cols] of parts [count, cols].
void launch_add_parts(const float* parts, std::int64_t count, std::int64_t cols, float* sums,
                      cudaStream_t stream);

}  // namespace fp8core
