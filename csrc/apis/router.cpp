// The router: the arguments are checked, then launched.
#include "fp8core/router.h"

#include "../cuda/router/router.h"
#include "check_cast.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;

void check_router(const RouterDesc& desc, const Matrix& x) {
  check(x);
  FP8CORE_CHECK(x.rows < kMostTokens && x.cols <= kMostExperts, "router: ", x.rows, " tokens and ",
                x.cols, " experts; expected less than 2^31 and at most ", kMostExperts);
  FP8CORE_CHECK(desc.topk >= 1 && (x.rows == 0 || desc.topk <= x.cols), "router: top ", desc.topk,
                " of ", x.cols, " experts");
  if (desc.num_groups == 0) return;
  FP8CORE_CHECK(
      desc.num_groups > 0 && desc.num_groups <= kMostExpertGroups && x.cols % desc.num_groups == 0,
      "router: ", desc.num_groups, " groups of ", x.cols, " experts; expected a divisor, at most ",
      kMostExpertGroups);
  FP8CORE_CHECK(desc.group_topk >= 1 && desc.group_topk <= desc.num_groups &&
                    desc.topk / desc.group_topk <= x.cols / desc.num_groups,
                "router: top ", desc.topk, " of the best ", desc.group_topk, " of ",
                desc.num_groups, " groups");
}

}  // namespace

void router(const RouterDesc& desc, const RouterArguments& arguments, StreamHandle stream) {
  check_router(desc, arguments.logits);
  if (is_empty(arguments.logits)) return;
  FP8CORE_CHECK_ADDRESS(arguments.probs, "router: probs");
  FP8CORE_CHECK_ADDRESS(arguments.routing_map, "router: routing_map");
  FP8CORE_CHECK_ADDRESS(arguments.scores, "router: scores");
  launch_router(desc, arguments, as_stream(stream));
}

void router_backward(const RouterDesc& desc, const RouterBackwardArguments& arguments,
                     StreamHandle stream) {
  check_router(desc, arguments.grad_probs);
  if (is_empty(arguments.grad_probs)) return;
  FP8CORE_CHECK_ADDRESS(arguments.routing_map, "router_backward: routing_map");
  FP8CORE_CHECK_ADDRESS(arguments.scores, "router_backward: scores");
  FP8CORE_CHECK_ADDRESS(arguments.grad_logits, "router_backward: the result");
  launch_router_backward(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
