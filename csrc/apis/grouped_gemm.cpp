// Products of groups: the arguments are checked, then launched.
#include "fp8core/grouped_gemm.h"

#include <algorithm>

#include "../cuda/gemm/grouped_params.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  // sizes are counted in ints
constexpr std::uintptr_t kAlignment = 16;                  // bytes

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kAlignment == 0;
}

// Codes in b alone.
bool is_mixed(const GroupedGemmDesc& desc) { return desc.a_scale == ScaleMode::kNone; }

int bytes_of_a(const GroupedGemmDesc& desc) { return is_mixed(desc) ? 2 : 1; }

void check_mixed(const GroupedGemmDesc& desc) {
  const bool is_16_bits = desc.a == ElementType::kBFloat16 || desc.a == ElementType::kFloat16;
  FP8CORE_CHECK(is_16_bits && desc.b == ElementType::kE4M3 && desc.b_scale != ScaleMode::kNone &&
                    !desc.contracts && !desc.accumulate,
                "grouped_gemm: an operand without a scale has 16 bits, the other e4m3; their "
                "products are neither added up nor contracted");
}

void check(const GroupedGemmDesc& desc) {
  if (is_mixed(desc)) check_mixed(desc);
  FP8CORE_CHECK(desc.a != ElementType::kE5M2 || desc.b != ElementType::kE5M2,
                "grouped_gemm: e5m2 by e5m2");
  for (const ScaleMode mode : {desc.a_scale, desc.b_scale})
    FP8CORE_CHECK(
        mode == ScaleMode::kTensor || mode == ScaleMode::kRow || has_blocks(mode) || is_mixed(desc),
        "grouped_gemm: no kernels for this scale mode");
  FP8CORE_CHECK(is_mixed(desc) || has_blocks(desc.a_scale) == has_blocks(desc.b_scale),
                "grouped_gemm: blocks along k in one operand alone");
  FP8CORE_CHECK(!desc.accumulate || desc.out == ElementType::kFloat32,
                "grouped_gemm: accumulates into float32 alone");
}

// How many tensors there are of each kind.
void check_counts(const GroupedGemmDesc& desc, const GroupedGemmArguments& given) {
  const auto groups = static_cast<std::size_t>(given.groups);
  const std::size_t per_group = desc.contracts ? 1 : groups, outputs = desc.contracts ? groups : 1;
  FP8CORE_CHECK(given.a.data.size() == 1 && given.a.scale_inv.size() == (is_mixed(desc) ? 0 : 1) &&
                    given.b.data.size() == per_group && given.b.scale_inv.size() == per_group &&
                    given.d.size() == outputs &&
                    (given.bias.empty() || given.bias.size() == groups),
                "grouped_gemm: ", given.b.data.size(), " b, ", given.d.size(), " d and ",
                given.bias.size(), " bias for ", given.groups, " groups");
}

void check(const char* name, const GroupedOperand& operand, bool has_elements) {
  for (const void* data : operand.data) {
    if (has_elements) FP8CORE_CHECK_ADDRESS(data, "grouped_gemm: ", name);
    FP8CORE_CHECK(is_aligned(data), "grouped_gemm: codes at an address that is no multiple of 16");
  }
  if (!has_elements) return;
  for (const float* scale_inv : operand.scale_inv)
    FP8CORE_CHECK_ADDRESS(scale_inv, "grouped_gemm: scale_inv of ", name);
}

void check(const GroupedGemmDesc& desc, const GroupedGemmArguments& given) {
  FP8CORE_CHECK(given.groups > 0 && given.m >= 0 && given.n > 0 && given.k >= 0 &&
                    std::max({given.m, given.n, given.k}) < kMostRows,
                "grouped_gemm: m=", given.m, " n=", given.n, " k=", given.k, " in ", given.groups,
                " groups; expected at least one group and sizes below ", kMostRows);
  FP8CORE_CHECK(given.n % 16 == 0, "grouped_gemm: n=", given.n, "; expected a multiple of 16");
  check_counts(desc, given);
  check(desc);
  FP8CORE_CHECK(given.a.pitch % 16 == 0 && given.b.pitch % 16 == 0 &&
                    given.a.pitch >= given.k * bytes_of_a(desc) && given.b.pitch >= given.k,
                "grouped_gemm: ", given.a.pitch, " and ", given.b.pitch,
                " bytes between rows; expected multiples of 16 from k=", given.k, " on");
  FP8CORE_CHECK(!is_mixed(desc) || (given.k > 0 && given.k % 16 == 0), "grouped_gemm: k=", given.k,
                " by codes alone; expected a multiple of 16");
  FP8CORE_CHECK_ADDRESS(given.offsets, "grouped_gemm: group_offsets");
  check("a", given.a, given.m > 0 && given.k > 0);
  check("b", given.b, given.k > 0);
  for (const void* d : given.d) {
    if (given.m > 0) FP8CORE_CHECK_ADDRESS(d, "grouped_gemm: d");
    FP8CORE_CHECK(is_aligned(d), "grouped_gemm: d at an address that is no multiple of 16");
  }
  for (const void* bias : given.bias) FP8CORE_CHECK_ADDRESS(bias, "grouped_gemm: a bias");
}

}  // namespace

void grouped_gemm(const GroupedGemmDesc& desc, const GroupedGemmArguments& arguments,
                  StreamHandle stream) {
  check(desc, arguments);
  if (arguments.m == 0) return;
  launch_grouped_gemm(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
