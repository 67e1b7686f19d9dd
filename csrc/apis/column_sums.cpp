// Column sums: the arguments are checked, then launched.
#include "fp8core/column_sums.h"

#include "../cuda/sums/column_sums.h"
#include "check_cast.h"

namespace fp8core {

std::int64_t ColumnSumsDesc::workspace_floats(std::int64_t rows, std::int64_t cols) const {
  const std::int64_t tiles = num_row_tiles(rows);
  return tiles <= kFewTiles ? 0 : tiles * cols;
}

void column_sums(const ColumnSumsDesc& desc, const ColumnSumsArguments& arguments,
                 StreamHandle stream) {
  const Matrix& x = arguments.x;
  check(x);
  if (is_empty(x)) return;
  FP8CORE_CHECK_ADDRESS(arguments.sums, "column_sums: the result");
  if (desc.workspace_floats(x.rows, x.cols) > 0)
    FP8CORE_CHECK_ADDRESS(arguments.workspace, "column_sums: the workspace");
  launch_column_sums(desc, arguments, as_stream(stream));
}

void add_tile_sums(const AddTileSumsArguments& arguments, int device, StreamHandle stream) {
  FP8CORE_CHECK(arguments.rows > 0 && arguments.cols > 0, "add_tile_sums: those of ",
                arguments.rows, " x ", arguments.cols, " elements");
  FP8CORE_CHECK_ADDRESS(arguments.tile_sums, "add_tile_sums: tile_sums");
  FP8CORE_CHECK_ADDRESS(arguments.sums, "add_tile_sums: the result");
  const DeviceGuard guard(device);
  launch_add_parts(arguments.tile_sums, num_row_tiles(arguments.rows), arguments.cols,
                   arguments.sums, as_stream(stream));
}

}  // namespace fp8core
