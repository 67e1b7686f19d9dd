// The launch of column sums, and the parts of the rows that they are added in.
#pragma once

#include "fp8core/column_sums.h"

namespace fp8core {

constexpr int kSumColumns = 256;  // that a block of threads adds
constexpr int kSumRowLanes = 8;   // rows that a block reads at once
constexpr int kFewRows = 256;     // that one block adds as fast as several and a second launch
constexpr int kSumBlocks = 512;   // that fill a device: four a multiprocessor, and few partial sums

// How many parts of adjacent rows are added apart; their sums are added after that.
inline std::int64_t num_row_parts(std::int64_t rows, std::int64_t cols) {
  if (rows <= kFewRows) return 1;
  const std::int64_t tiles = (cols + kSumColumns - 1) / kSumColumns;
  const std::int64_t most = (rows + 63) / 64;
  return std::max<std::int64_t>(
      1, std::min<std::int64_t>(kSumBlocks / std::max<std::int64_t>(tiles, 1), most));
}

// Of arguments that have been checked, with at least one element.
void launch_column_sums(const ColumnSumsDesc& desc, const ColumnSumsArguments& arguments,
                        cudaStream_t stream);

}  // namespace fp8core
