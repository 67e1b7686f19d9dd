// The entry: checks what is given, describes operands to the copy engine, launches.
#include "fp8core/grouped_gemm.h"

#include <algorithm>

#include "fp8core/device.h"
#include "grouped_params.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  // sizes are counted in ints
constexpr std::int64_t kTileColumns = 128;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// Of the driver, asked for by name: nothing is linked with it.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    FP8CORE_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                  cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || function == nullptr)
      throw std::runtime_error("grouped_gemm: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

// Codes [rows, k], copied in boxes of `box_rows` rows by 128 elements.
CUtensorMap describe(const void* data, std::int64_t rows, std::int64_t k, std::int64_t pitch,
                     int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[] = {128, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult status =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(join("cuTensorMapEncodeTiled of ", rows, " x ", k, " codes, ", pitch,
                                  " bytes between rows: error ", static_cast<int>(status)));
  return map;
}

struct Strides {
  std::int64_t row, k, group;
};

// Where scales lie: from one row, block of k or group to the next. `is_stacked`: groups of rows.
Strides strides_of(const GroupedOperand& operand, ScaleMode mode, bool is_stacked) {
  const std::int64_t row = operand.scale_row_stride, k = operand.scale_k_stride;
  switch (mode) {
    case ScaleMode::kTensor: return {0, 0, is_stacked ? row : k};
    case ScaleMode::kRow: return {row, 0, is_stacked ? 0 : k};
    case ScaleMode::kVec128:
    case ScaleMode::kBlock128: return {row, k, 0};
    default: break;
  }
  throw std::invalid_argument("grouped_gemm: no kernels for this scale mode");
}

bool has_blocks(ScaleMode mode) {
  return mode == ScaleMode::kVec128 || mode == ScaleMode::kBlock128;
}

Accumulation accumulation_of(const GroupedGemmDesc& desc) {
  if (has_blocks(desc.a_scale))
    return desc.b_scale == ScaleMode::kBlock128 ? Accumulation::kRowScales
                                                : Accumulation::kBothScales;
  return desc.fast_accumulation ? Accumulation::kTensorCore : Accumulation::kFloat32;
}

void check_operand(const char* what, const GroupedOperand& operand, bool has_elements) {
  for (const void* data : operand.data) {
    if (has_elements) FP8CORE_CHECK_ADDRESS(data, "grouped_gemm: ", what);
    FP8CORE_CHECK(reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
                  "grouped_gemm: codes at an address that is no multiple of 16");
  }
  if (!has_elements) return;
  for (const float* scale_inv : operand.scale_inv)
    FP8CORE_CHECK_ADDRESS(scale_inv, "grouped_gemm: scale_inv of ", what);
}

void check(const GroupedGemmDesc& desc, const GroupedGemmArguments& given) {
  const auto groups = static_cast<std::size_t>(given.groups);
  const std::size_t per_group = desc.contracts ? 1 : groups, outputs = desc.contracts ? groups : 1;
  FP8CORE_CHECK(given.groups > 0 && given.m >= 0 && given.n > 0 && given.k >= 0 &&
                    std::max({given.m, given.n, given.k}) < kMostRows,
                "grouped_gemm: m=", given.m, " n=", given.n, " k=", given.k, " in ", given.groups,
                " groups; expected at least one group and sizes below ", kMostRows);
  FP8CORE_CHECK(given.n % 16 == 0, "grouped_gemm: n=", given.n, "; expected a multiple of 16");
  FP8CORE_CHECK(given.a.data.size() == 1 && given.a.scale_inv.size() == 1 &&
                    given.b.data.size() == per_group && given.b.scale_inv.size() == per_group &&
                    given.d.size() == outputs &&
                    (given.bias.empty() || given.bias.size() == groups),
                "grouped_gemm: ", given.b.data.size(), " b, ", given.d.size(), " d and ",
                given.bias.size(), " bias for ", given.groups, " groups");
  FP8CORE_CHECK(given.a.pitch % 16 == 0 && given.b.pitch % 16 == 0 && given.a.pitch >= given.k &&
                    given.b.pitch >= given.k,
                "grouped_gemm: ", given.a.pitch, " and ", given.b.pitch,
                " bytes between rows; expected multiples of 16 from k=", given.k, " on");
  FP8CORE_CHECK(!desc.accumulate || desc.out == ElementType::kFloat32,
                "grouped_gemm: accumulates into float32 alone");
  FP8CORE_CHECK(has_blocks(desc.a_scale) == has_blocks(desc.b_scale),
                "grouped_gemm: blocks along k in one operand alone");
  FP8CORE_CHECK_ADDRESS(given.offsets, "grouped_gemm: group_offsets");
  check_operand("a", given.a, given.m > 0 && given.k > 0);
  check_operand("b", given.b, given.k > 0);
  for (const void* d : given.d) {
    if (given.m > 0) FP8CORE_CHECK_ADDRESS(d, "grouped_gemm: d");
    FP8CORE_CHECK(reinterpret_cast<std::uintptr_t>(d) % 16 == 0,
                  "grouped_gemm: d at an address that is no multiple of 16");
  }
  for (const void* bias : given.bias) FP8CORE_CHECK_ADDRESS(bias, "grouped_gemm: a bias");
}

// What the launches of all chunks of groups share.
GroupedParams common(const GroupedGemmDesc& desc, const GroupedGemmArguments& given) {
  GroupedParams p{};
  const Strides a = strides_of(given.a, desc.a_scale, !desc.contracts);
  const Strides b = strides_of(given.b, desc.b_scale, false);
  p.offsets = given.offsets;
  p.a_scale = given.a.scale_inv[0];
  p.a_row_stride = a.row, p.a_k_stride = a.k, p.a_group_stride = a.group;
  p.b_row_stride = b.row, p.b_k_stride = b.k;
  p.b_group_stride = desc.contracts ? b.group : 0;
  p.m = static_cast<int>(given.m), p.n = static_cast<int>(given.n), p.k = static_cast<int>(given.k);
  p.scale_blocks = static_cast<int>(std::min(given.a.scale_blocks, given.b.scale_blocks));
  p.groups = static_cast<int>(given.groups);
  p.out = desc.out, p.bias_type = given.bias_type;
  p.a_in_blocks = desc.a_scale == ScaleMode::kBlock128;
  p.b_in_blocks = desc.b_scale == ScaleMode::kBlock128;
  p.contracts = desc.contracts, p.accumulate = desc.accumulate, p.has_bias = !given.bias.empty();
  return p;
}

void launch(const GroupedGemmDesc& desc, const GroupedParams& params, const GroupedLaunch& how,
            cudaStream_t stream) {
  const bool a_is_wide = desc.a == ElementType::kE5M2, b_is_wide = desc.b == ElementType::kE5M2;
  FP8CORE_CHECK(!(a_is_wide && b_is_wide), "grouped_gemm: e5m2 by e5m2");
  if (a_is_wide) return launch_grouped_e5m2_e4m3(params, how, stream);
  if (b_is_wide) return launch_grouped_e4m3_e5m2(params, how, stream);
  launch_grouped_e4m3_e4m3(params, how, stream);
}

}  // namespace

void grouped_gemm(const GroupedGemmDesc& desc, const GroupedGemmArguments& given, int device,
                  cudaStream_t stream) {
  check(desc, given);
  if (given.m == 0) return;
  const DeviceGuard guard(device);
  int multiprocessors = 0;
  FP8CORE_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  GroupedLaunch how{};
  how.accumulation = accumulation_of(desc);
  // A tile of 256 rows reads less for each product, one of 128 wastes less at a group's end.
  how.is_tall = given.m / (desc.contracts ? 1 : given.groups) >= 192;
  const int tile_rows = how.is_tall ? 256 : 128;
  GroupedParams params = common(desc, given);
  if (given.k > 0) params.a = describe(given.a.data[0], given.m, given.k, given.a.pitch, tile_rows);
  const std::int64_t columns = (given.n + kTileColumns - 1) / kTileColumns;
  for (int first = 0; first < params.groups; first += kGroupsPerLaunch) {
    const int count = std::min(kGroupsPerLaunch, params.groups - first);
    params.first_group = first;
    params.count = count;
    params.takes_tail = !desc.contracts && first + count == params.groups;
    for (int i = 0; i < count; ++i) {
      const int group = first + i;
      if (!desc.contracts || group == first) {
        const int at = desc.contracts ? 0 : group;
        if (given.k > 0)
          params.b[i] = describe(given.b.data[at], given.n, given.k, given.b.pitch, 128);
        params.b_scale[i] = given.b.scale_inv[at];
      }
      if (!given.bias.empty()) params.bias[i] = given.bias[group];
      if (desc.contracts) params.d[i] = given.d[group];
    }
    if (!desc.contracts) params.d[0] = given.d[0];
    const std::int64_t rows = desc.contracts ? count * ((given.m + tile_rows - 1) / tile_rows)
                                             : given.m / tile_rows + count + 1;
    how.blocks = static_cast<int>(std::min<std::int64_t>(multiprocessors, rows * columns));
    launch(desc, params, how, stream);
  }
}

}  // namespace fp8core
