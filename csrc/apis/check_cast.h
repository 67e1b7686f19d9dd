// Checks that several casts share.
#pragma once

#include "../cuda/quantize/casts.h"

namespace fp8core {

inline bool is_empty(const Matrix& x) { return x.rows == 0 || x.cols == 0; }

inline void check(const Matrix& x) {
  FP8CORE_CHECK(x.rows >= 0 && x.cols >= 0 && x.stride >= x.cols, "x is ", x.rows, " x ", x.cols,
                " with ", x.stride, " elements between rows; expected at least ", x.cols);
  if (!is_empty(x)) FP8CORE_CHECK_ADDRESS(x.data, "x [", x.rows, ", ", x.cols, "]");
}

inline void check_grid(const char* entry, std::int64_t tiles) {
  FP8CORE_CHECK(tiles < (std::int64_t{1} << 31), entry, ": ", tiles,
                " tiles of 128 x 128, more than a grid takes");
}

constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  // of groups: they are counted in ints

inline void check_columnwise(const QuantizeArguments& arguments) {
  const Groups& groups = arguments.groups;
  const std::int64_t rows = arguments.x.rows, pitch = pitch_of_columns(arguments);
  const std::int64_t least =
      groups.offsets == nullptr ? rows : (rows / kGroupStep + groups.count) * kGroupStep;
  FP8CORE_CHECK(arguments.columnwise.codes == nullptr || pitch >= least, "quantize: ", pitch,
                " bytes between the rows of columnwise codes; expected at least ", least);
}

inline void check_groups(const char* entry, const Matrix& x, const Groups& groups) {
  FP8CORE_CHECK(groups.offsets == nullptr || (groups.count > 0 && x.rows < kMostRows), entry, ": ",
                x.rows, " rows in ", groups.count, " groups; expected at least one group and less ",
                "than ", kMostRows, " rows");
}

// All but the address of x.
inline void check_results(const QuantizeDesc& desc, const QuantizeArguments& arguments) {
  const Matrix& x = arguments.x;
  const Groups& groups = arguments.groups;
  FP8CORE_CHECK(arguments.rowwise.codes != nullptr || arguments.columnwise.codes != nullptr,
                "quantize: neither orientation is asked for");
  FP8CORE_CHECK(desc.granularity != Granularity::kDelayed || arguments.scale != nullptr,
                "quantize: delayed scaling takes a scale");
  const bool takes_workspace =
      desc.granularity == Granularity::kTensor || desc.granularity == Granularity::kRow;
  FP8CORE_CHECK(!takes_workspace || arguments.workspace != nullptr,
                "quantize: this granularity takes a workspace");
  check_columnwise(arguments);
  check_groups("quantize", x, groups);
  FP8CORE_CHECK(arguments.num_partials >= 0 && arguments.num_partials <= kMaxPartials,
                "quantize: ", arguments.num_partials, " amaxes in the workspace; expected 0 to ",
                kMaxPartials);
  for (const QuantizeOutput* out : {&arguments.rowwise, &arguments.columnwise})
    if (out->codes != nullptr && !is_empty(x))
      FP8CORE_CHECK_ADDRESS(out->scale_inv, "quantize: a scale_inv");
}

// `rows` of the operand, `block_rows` under one scale.
inline void check(const ByteScaled& out, std::int64_t rows, int block_rows) {
  if (out.codes == nullptr) return;
  const std::int64_t least = ((rows + block_rows - 1) / block_rows + 15) / 16 * 16;
  FP8CORE_CHECK(out.scales != nullptr && reinterpret_cast<std::uintptr_t>(out.scales) % 16 == 0 &&
                    out.pitch >= least && out.pitch % 16 == 0,
                "scales of ", rows, " rows have a pitch of ", out.pitch,
                " bytes; expected a multiple of 16 from ", least, " on, at such an address");
}

// Zeros end with the last block of MXFP8 that has rows of x: of others no scales are written.
template <typename Arguments>
void check_column_rows(const Arguments& arguments) {
  const std::int64_t rows = arguments.x.rows, column_rows = rows_of_columns(arguments);
  FP8CORE_CHECK(column_rows >= rows && column_rows <= (rows + kMxBlock - 1) / kMxBlock * kMxBlock,
                "x has ", rows, " rows, its columnwise operand ", column_rows,
                "; expected as many, or up to the next multiple of ", kMxBlock);
}

inline void check_results(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments) {
  check_column_rows(arguments);
  const int block_rows = desc.is_square ? kMxBlock : 1;
  check(arguments.rowwise, arguments.x.rows, block_rows);
  check(arguments.columnwise, arguments.x.cols, block_rows);
}

inline void check_results(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments) {
  const Matrix& x = arguments.x;
  const bool has_rows = arguments.rowwise.codes != nullptr;
  const bool has_columns = arguments.columnwise.codes != nullptr;
  FP8CORE_CHECK_ADDRESS(arguments.workspace, "quantize: the workspace");
  if (has_rows) FP8CORE_CHECK_ADDRESS(arguments.row_global, "global_scale_inv");
  if (has_columns) FP8CORE_CHECK_ADDRESS(arguments.column_global, "global_scale_inv");
  FP8CORE_CHECK(!has_rows || x.cols % 2 == 0, "x is ", x.rows, " x ", x.cols,
                "; two codes a byte take an even number of columns");
  const int step = desc.transforms ? 16 : 2;
  check_column_rows(arguments);
  FP8CORE_CHECK(!has_columns || rows_of_columns(arguments) % step == 0, "x is ", x.rows, " x ",
                x.cols, ", with ", rows_of_columns(arguments),
                " rows columnwise; expected a multiple of ", step);
  const int block_rows = desc.is_square ? kFp4Block : 1;
  check(arguments.rowwise, x.rows, block_rows);
  check(arguments.columnwise, x.cols, block_rows);
}

}  // namespace fp8core
