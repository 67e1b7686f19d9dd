// Permutations: the arguments are checked, then launched.
#include "fp8core/permutation.h"

#include "../cuda/permutation/permutation.h"
#include "check_cast.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 31;

void check_route(const char* entry, std::int64_t tokens, std::int64_t slots, std::int64_t rows) {
  FP8CORE_CHECK(tokens >= 0 && slots >= 0 && rows >= 0, entry, ": ", tokens, " tokens with ", slots,
                " slots each, ", rows, " rows; expected none below 0");
  FP8CORE_CHECK(slots <= kMostSlots, entry, ": ", slots, " slots of a token; expected at most ",
                kMostSlots);
  FP8CORE_CHECK(tokens * slots < kMost && rows < kMost && tokens + rows < kMost, entry, ": ",
                tokens, " tokens with ", slots, " slots each, ", rows,
                " rows; expected less than 2^31");
}

void check_bytes(const char* entry, int bytes) {
  FP8CORE_CHECK(bytes == 2 || bytes == 4 || bytes == 8, entry, ": elements of ", bytes,
                " bytes; expected 2, 4 or 8");
}

}  // namespace

std::int64_t route_workspace_ints(std::int64_t tokens, std::int64_t slots) {
  return (tokens + kTokensPerBlock - 1) / kTokensPerBlock * slots + 1;
}

void route_by_mask(const MaskRouteArguments& arguments, int device, StreamHandle stream) {
  const MaskRouteArguments& a = arguments;
  check_route("route", a.tokens, a.slots, a.rows);
  FP8CORE_CHECK(a.bytes == 1 || a.bytes == 2 || a.bytes == 4 || a.bytes == 8,
                "route: a mask of elements of ", a.bytes, " bytes; expected 1, 2, 4 or 8");
  FP8CORE_CHECK(a.tokens > 0 && a.slots > 0, "route: a mask without elements");
  FP8CORE_CHECK_ADDRESS(a.routing, "route: routing");
  FP8CORE_CHECK_ADDRESS(a.index, "route: index");
  FP8CORE_CHECK_ADDRESS(a.workspace, "route: the workspace");
  if (a.rows > 0) FP8CORE_CHECK_ADDRESS(a.sources, "route: sources");
  launch_route_by_mask(a, device, as_stream(stream));
}

void route_by_rows(const RowRouteArguments& arguments, int device, StreamHandle stream) {
  const RowRouteArguments& a = arguments;
  check_route("route", a.entries, 1, a.rows);
  if (a.entries > 0) {
    FP8CORE_CHECK_ADDRESS(a.routing, "route: routing");
    FP8CORE_CHECK_ADDRESS(a.index, "route: index");
  }
  if (a.rows > 0) FP8CORE_CHECK_ADDRESS(a.sources, "route: sources");
  launch_route_by_rows(a, device, as_stream(stream));
}

void dispatch_rows(const RowsDesc& desc, const DispatchArguments& arguments, StreamHandle stream) {
  const DispatchArguments& a = arguments;
  check(a.x);
  check_route("dispatch_rows", a.x.rows, a.slots, a.rows);
  if (a.rows == 0) return;
  FP8CORE_CHECK_ADDRESS(a.sources, "dispatch_rows: sources");
  if (a.x.rows * a.slots > 0) FP8CORE_CHECK_ADDRESS(a.index, "dispatch_rows: index");
  if (a.x.cols > 0) FP8CORE_CHECK_ADDRESS(a.y, "dispatch_rows: the result");
  if (a.permuted != nullptr) {
    check_bytes("dispatch_rows: probs", a.prob_bytes);
    if (a.x.rows * a.slots > 0) FP8CORE_CHECK_ADDRESS(a.probs, "dispatch_rows: probs");
  }
  launch_dispatch(desc, a, as_stream(stream));
}

void combine_rows(const RowsDesc& desc, const CombineArguments& arguments, StreamHandle stream) {
  const CombineArguments& a = arguments;
  check(a.x);
  check_route("combine_rows", a.tokens, a.slots, a.x.rows);
  if (a.tokens == 0) return;
  if (a.slots > 0) FP8CORE_CHECK_ADDRESS(a.index, "combine_rows: index");
  if (a.x.cols > 0) FP8CORE_CHECK_ADDRESS(a.y, "combine_rows: the result");
  if (a.values != nullptr) {
    check_bytes("combine_rows: row_values", a.value_bytes);
    if (a.x.rows > 0) FP8CORE_CHECK_ADDRESS(a.row_values, "combine_rows: row_values");
  }
  launch_combine(desc, a, as_stream(stream));
}

void combine_rows_backward(const RowsDesc& desc, const CombineBackwardArguments& arguments,
                           StreamHandle stream) {
  const CombineBackwardArguments& a = arguments;
  check(a.grad);
  check(a.x);
  FP8CORE_CHECK(a.grad.cols == a.x.cols, "combine_rows_backward: ", a.grad.cols,
                " columns of the gradient, ", a.x.cols, " of x");
  check_route("combine_rows_backward", a.grad.rows, a.slots, a.x.rows);
  if (a.grad.rows == 0 && a.x.rows == 0) return;
  if (a.grad.rows * a.slots > 0) {
    FP8CORE_CHECK_ADDRESS(a.index, "combine_rows_backward: index");
    FP8CORE_CHECK_ADDRESS(a.weights, "combine_rows_backward: weights");
    FP8CORE_CHECK_ADDRESS(a.grad_weights, "combine_rows_backward: the gradient of the weights");
  }
  if (a.x.rows > 0) {
    FP8CORE_CHECK_ADDRESS(a.sources, "combine_rows_backward: sources");
    if (a.x.cols > 0) FP8CORE_CHECK_ADDRESS(a.grad_x, "combine_rows_backward: the gradient of x");
  }
  launch_combine_backward(desc, a, as_stream(stream));
}

}  // namespace fp8core
