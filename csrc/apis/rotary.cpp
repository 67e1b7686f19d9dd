// Rotary position embedding: the arguments are checked, then launched.
#include "fp8core/rotary.h"

#include "../cuda/rotary/rotary.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostCounted = std::int64_t{1} << 30;

bool is_empty(const HeadsView& x) {
  return x.outer == 0 || x.inner == 0 || x.heads == 0 || x.head_size == 0;
}

void check(const HeadsView& x, const char* name) {
  FP8CORE_CHECK(x.outer >= 0 && x.inner >= 0 && x.heads >= 0 && x.head_size >= 0 &&
                    x.outer_stride >= 0 && x.inner_stride >= 0 && x.head_stride >= 0 &&
                    x.element_stride >= 0,
                "rotary: ", name, " [", x.outer, ", ", x.inner, ", ", x.heads, ", ", x.head_size,
                "] with strides ", x.outer_stride, ", ", x.inner_stride, ", ", x.head_stride, ", ",
                x.element_stride, "; expected none below 0");
  if (is_empty(x)) return;
  FP8CORE_CHECK(
      x.outer < kMostCounted && x.inner < kMostCounted && x.outer * x.inner < kMostCounted,
      "rotary: ", x.outer, " x ", x.inner, " tokens; expected less than ", kMostCounted);
  FP8CORE_CHECK(
      x.heads < kMostCounted && x.head_size < kMostCounted && x.heads * x.head_size < kMostCounted,
      "rotary: ", x.heads, " heads of ", x.head_size, " elements; expected less than ",
      kMostCounted, " elements a token");
  FP8CORE_CHECK_ADDRESS(x.data, "rotary: ", name);
}

void check_parts(const RotaryArguments& arguments) {
  const HeadsView &x = arguments.x, &keys = arguments.keys, &values = arguments.values;
  if (keys.heads == 0 && values.heads == 0) return;
  check(keys, "keys");
  check(values, "values");
  const auto fits = [&](const HeadsView& part) {
    return part.outer == x.outer && part.inner == x.inner && part.head_size == x.head_size &&
           part.heads > 0;
  };
  FP8CORE_CHECK(x.heads > 0 && fits(keys) && fits(values), "rotary: x [", x.outer, ", ", x.inner,
                ", ", x.heads, ", ", x.head_size, "] with keys [", keys.outer, ", ", keys.inner,
                ", ", keys.heads, ", ", keys.head_size, "] and values [", values.outer, ", ",
                values.inner, ", ", values.heads, ", ", values.head_size,
                "]; expected heads of the same tokens and size in each");
  const std::int64_t heads = x.heads + keys.heads + values.heads;
  FP8CORE_CHECK(heads < kMostCounted && x.head_size < kMostCounted / heads, "rotary: ", heads,
                " heads of ", x.head_size, " elements; expected less than ", kMostCounted,
                " elements a token");
}

void check_angles(const RotaryArguments& arguments) {
  FP8CORE_CHECK(arguments.rotated >= 0 && arguments.rotated % 2 == 0 &&
                    arguments.rotated <= arguments.x.head_size,
                "rotary: ", arguments.rotated, " of ", arguments.x.head_size,
                " elements are rotated; expected an even number of them");
  FP8CORE_CHECK(arguments.positions >= 0 && arguments.positions < kMostCounted,
                "rotary: angles of ", arguments.positions, " positions; expected 0 to ",
                kMostCounted - 1);
  if (arguments.positions > 0 && arguments.rotated > 0)
    FP8CORE_CHECK_ADDRESS(arguments.freqs, "rotary: freqs");
}

void check_sequences(RotaryLayout layout, const RotaryArguments& arguments) {
  if (layout != RotaryLayout::kThd) {
    FP8CORE_CHECK(arguments.cu_seqlens == nullptr,
                  "rotary: cu_seqlens; expected them in the layout thd alone");
    return;
  }
  FP8CORE_CHECK_ADDRESS(arguments.cu_seqlens, "rotary: cu_seqlens of the layout thd");
  FP8CORE_CHECK(arguments.x.inner == 1, "rotary: ", arguments.x.inner,
                " tokens side by side; expected 1 in the layout thd");
  FP8CORE_CHECK(arguments.sequences >= 0 && arguments.sequences < kMostCounted,
                "rotary: ", arguments.sequences, " sequences; expected 0 to ", kMostCounted - 1);
}

}  // namespace

void rotary(const RotaryDesc& desc, const RotaryArguments& arguments, StreamHandle stream) {
  check(arguments.x, "x");
  check_parts(arguments);
  check_angles(arguments);
  if (is_empty(arguments.x)) return;
  check_sequences(desc.layout, arguments);
  FP8CORE_CHECK_ADDRESS(arguments.y, "rotary: the result");
  launch_rotary(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
