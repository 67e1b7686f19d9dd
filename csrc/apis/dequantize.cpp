// From codes to values: the arguments are checked, then launched.
#include "fp8core/dequantize.h"

#include "../cuda/dequantize/dequantize.h"

namespace fp8core {
namespace {

// The widest vector of elements that a thread stores: its scale is that of all of them.
constexpr std::int64_t kLeastAlongK = 16;

bool is_power_of_two(std::int64_t size) { return size > 0 && (size & (size - 1)) == 0; }

void check(const DequantizeDesc& desc) {
  const bool is_fp4 = desc.format == ElementType::kE2M1;
  const bool is_fp8 = desc.format == ElementType::kE4M3 || desc.format == ElementType::kE5M2;
  FP8CORE_CHECK(is_fp4 || is_fp8, "dequantize: expected codes of e4m3, e5m2 or e2m1");
  FP8CORE_CHECK(is_fp4 == (desc.scale == ScaleFormat::kE4M3),
                "dequantize: scales of e4m3 go with codes of e2m1 alone");
  FP8CORE_CHECK(desc.out == ElementType::kFloat32 || desc.out == ElementType::kBFloat16 ||
                    desc.out == ElementType::kFloat16,
                "dequantize: expected values in float32, bfloat16 or float16");
  FP8CORE_CHECK(desc.rows_per_scale == 0 || is_power_of_two(desc.rows_per_scale),
                "dequantize: ", desc.rows_per_scale,
                " rows under a scale; expected 0 or a power of two");
  FP8CORE_CHECK(desc.k_per_scale == 0 ||
                    (is_power_of_two(desc.k_per_scale) && desc.k_per_scale >= kLeastAlongK),
                "dequantize: ", desc.k_per_scale,
                " elements of a row under a scale; expected 0 or ", "a power of two from ",
                kLeastAlongK, " on");
}

void check(const DequantizeDesc& desc, const DequantizeArguments& arguments) {
  const std::int64_t rows = arguments.rows, k = arguments.k;
  const int per_byte = desc.format == ElementType::kE2M1 ? 2 : 1;
  FP8CORE_CHECK(rows > 0 && k > 0 && k % per_byte == 0 && arguments.stride >= k / per_byte,
                "dequantize: ", rows, " rows of ", k, " codes, ", arguments.stride,
                " bytes apart; expected whole bytes, and rows that do not overlap");
  FP8CORE_CHECK_ADDRESS(arguments.codes, "dequantize: codes");
  FP8CORE_CHECK_ADDRESS(arguments.scale_inv, "dequantize: scale_inv");
  FP8CORE_CHECK_ADDRESS(arguments.x, "dequantize: the result");
  if (desc.scale == ScaleFormat::kE4M3)
    FP8CORE_CHECK_ADDRESS(arguments.global_scale_inv, "dequantize: global_scale_inv");
}

}  // namespace

void dequantize(const DequantizeDesc& desc, const DequantizeArguments& arguments,
                StreamHandle stream) {
  check(desc);
  if (arguments.rows == 0 || arguments.k == 0) return;
  check(desc, arguments);
  launch_dequantize(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
