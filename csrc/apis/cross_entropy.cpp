// Cross entropy: the arguments are checked, then launched.
#include "fp8core/cross_entropy.h"

#include "../cuda/loss/cross_entropy.h"
#include "check_cast.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;

void check_logits(const char* entry, const Matrix& x, const std::int64_t* target) {
  check(x);
  FP8CORE_CHECK(x.rows < kMostRows, entry, ": ", x.rows, " rows; expected less than 2^31");
  FP8CORE_CHECK(x.rows == 0 || x.cols > 0, entry, ": logits of no class");
  if (x.rows > 0) FP8CORE_CHECK_ADDRESS(target, entry, ": target");
}

}  // namespace

void cross_entropy(const CrossEntropyDesc& desc, const CrossEntropyArguments& arguments,
                   StreamHandle stream) {
  check_logits("cross_entropy", arguments.x, arguments.target);
  if (arguments.x.rows == 0) return;
  FP8CORE_CHECK_ADDRESS(arguments.loss, "cross_entropy: loss");
  FP8CORE_CHECK_ADDRESS(arguments.largest, "cross_entropy: largest");
  FP8CORE_CHECK_ADDRESS(arguments.log_sum, "cross_entropy: log_sum");
  launch_cross_entropy(desc, arguments, as_stream(stream));
}

void cross_entropy_backward(const CrossEntropyDesc& desc,
                            const CrossEntropyBackwardArguments& arguments, StreamHandle stream) {
  check_logits("cross_entropy_backward", arguments.x, arguments.target);
  if (arguments.x.rows == 0) return;
  FP8CORE_CHECK_ADDRESS(arguments.largest, "cross_entropy_backward: largest");
  FP8CORE_CHECK_ADDRESS(arguments.log_sum, "cross_entropy_backward: log_sum");
  FP8CORE_CHECK_ADDRESS(arguments.grad, "cross_entropy_backward: the gradient of the loss");
  FP8CORE_CHECK_ADDRESS(arguments.grad_x, "cross_entropy_backward: the result");
  launch_cross_entropy_backward(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
