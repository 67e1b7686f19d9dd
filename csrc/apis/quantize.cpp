// Casts with float32 scales, and amaxes: the arguments are checked, then launched.
#include "fp8core/quantize.h"

#include "../cuda/quantize/casts.h"
#include "check_cast.h"

namespace fp8core {
namespace {

bool is_of_tensor(const AmaxDesc& desc, const AmaxArguments& arguments) {
  return desc.granularity == Granularity::kTensor && arguments.groups.offsets == nullptr;
}

void check(const QuantizeDesc& desc, const QuantizeArguments& arguments) {
  check(arguments.x);
  check_results(desc, arguments);
}

void check_amax(const AmaxDesc& desc, const AmaxArguments& arguments) {
  check(arguments.x);
  FP8CORE_CHECK(desc.granularity == Granularity::kTensor || desc.granularity == Granularity::kRow,
                "amax: expected the granularity of a tensor or of rows");
  check_groups("amax", arguments.x, arguments.groups);
  if (is_of_tensor(desc, arguments) && !is_empty(arguments.x))
    FP8CORE_CHECK_ADDRESS(arguments.workspace, "amax: the workspace");
}

}  // namespace

void store_group_offsets(const GroupOffsets& arguments, int device, StreamHandle stream) {
  if (arguments.offsets.empty()) return;
  FP8CORE_CHECK_ADDRESS(arguments.to, "store_group_offsets: their memory");
  launch_group_offsets(arguments, device, as_stream(stream));
}

void quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments, StreamHandle stream) {
  check(desc, arguments);
  const Matrix& x = arguments.x;
  if (x.cols == 0 || (x.rows == 0 && arguments.groups.offsets == nullptr)) return;
  check_grid("quantize", num_tiles(x, arguments.groups));
  launch_quantize(desc, arguments, as_stream(stream));
}

std::int64_t tile_sums_floats(std::int64_t rows, std::int64_t cols) {
  return (rows + kTile - 1) / kTile * cols;
}

std::int64_t QuantizeDesc::tile_sums_floats(std::int64_t rows, std::int64_t cols) const {
  return fp8core::tile_sums_floats(rows, cols);
}

void quantize_and_sum(const QuantizeDesc& desc, const QuantizeAndSumArguments& arguments,
                      StreamHandle stream) {
  const QuantizeArguments& cast = arguments.cast;
  check(desc, cast);
  if (is_empty(cast.x)) return;
  FP8CORE_CHECK(desc.input != InputType::kFloat32 && desc.granularity != Granularity::kBlock128 &&
                    cast.groups.offsets == nullptr,
                "quantize_and_sum takes bfloat16 and float16, not in groups, and no blocks of 128 ",
                "x 128");
  FP8CORE_CHECK_ADDRESS(arguments.tile_sums, "quantize_and_sum: tile_sums");
  check_grid("quantize_and_sum", num_tiles(cast.x, {}));
  launch_quantize_and_sum(desc, arguments, as_stream(stream));
}

void amax(const AmaxDesc& desc, const AmaxArguments& arguments, StreamHandle stream) {
  FP8CORE_CHECK_ADDRESS(arguments.amax_out, "amax: the result");
  check_amax(desc, arguments);
  check_grid("amax", num_tiles(arguments.x, arguments.groups));
  launch_amax(desc, arguments, as_stream(stream));
}

int partial_amaxes(const AmaxDesc& desc, const AmaxArguments& arguments, StreamHandle stream) {
  check_amax(desc, arguments);
  FP8CORE_CHECK(is_of_tensor(desc, arguments), "amax: partials are those of a tensor alone");
  return launch_partial_amaxes(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
