// The transpose of codes: the arguments are checked, then launched.
#include "fp8core/transpose.h"

#include "../cuda/transpose/transpose.h"

namespace fp8core {
namespace {

constexpr std::int64_t kStep = 16;           // of sizes and of addresses
constexpr std::int64_t kMost = 65535 * 128;  // rows of the tiles that a grid takes

bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kStep == 0;
}

}  // namespace

void transpose(const TransposeDesc& desc, const TransposeArguments& arguments,
               StreamHandle stream) {
  const std::int64_t rows = arguments.rows, cols = arguments.cols;
  FP8CORE_CHECK(rows >= 0 && cols >= 0 && rows % kStep == 0 && cols % kStep == 0 && rows <= kMost &&
                    cols <= kMost,
                "transpose: ", rows, " x ", cols, " codes; expected multiples of ", kStep,
                " up to ", kMost);
  if (rows == 0 || cols == 0) return;
  FP8CORE_CHECK_ADDRESS(arguments.codes, "transpose: codes");
  FP8CORE_CHECK_ADDRESS(arguments.transposed, "transpose: the result");
  FP8CORE_CHECK(is_aligned(arguments.codes) && is_aligned(arguments.transposed),
                "transpose: expected addresses that are multiples of ", kStep);
  launch_transpose(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
