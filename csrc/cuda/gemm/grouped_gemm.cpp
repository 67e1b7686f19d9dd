// Launches of grouped products: operands are described to the copy engine, groups go in chunks.
#include <algorithm>

#include "few_rows.h"
#include "grouped_params.h"

namespace fp8core {
namespace {

constexpr std::int64_t kTileColumns = 128;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// A function of the driver, looked up by name, so that the library is not linked with the driver.
Encode encoder() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    FP8CORE_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                  cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || function == nullptr)
      throw std::runtime_error("grouped_gemm: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
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

// Floats from the scale of one row, block of k or group to the next. `is_stacked`: groups of rows.
Strides strides_of(const GroupedOperand& operand, ScaleMode mode, bool is_stacked) {
  const std::int64_t row = operand.scale_row_stride, k = operand.scale_k_stride;
  switch (mode) {
    case ScaleMode::kTensor: return {0, 0, is_stacked ? row : k};
    case ScaleMode::kRow: return {row, 0, is_stacked ? 0 : k};
    default: return {row, k, 0};  // blocks along k
  }
}

Accumulation accumulation_of(const GroupedGemmDesc& desc) {
  if (has_blocks(desc.a_scale))
    return desc.b_scale == ScaleMode::kBlock128 ? Accumulation::kRowScales
                                                : Accumulation::kBothScales;
  return desc.fast_accumulation ? Accumulation::kTensorCore : Accumulation::kFloat32;
}

// The parameters that the launches of all chunks of groups share.
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
  if (desc.a == ElementType::kE5M2)
    return launch_grouped<Format::kE5M2, Format::kE4M3>(params, how, stream);
  if (desc.b == ElementType::kE5M2)
    return launch_grouped<Format::kE4M3, Format::kE5M2>(params, how, stream);
  launch_grouped<Format::kE4M3, Format::kE4M3>(params, how, stream);
}

}  // namespace

void launch_grouped_gemm(const GroupedGemmDesc& desc, const GroupedGemmArguments& given,
                         cudaStream_t stream) {
  if (desc.a_scale == ScaleMode::kNone) return launch_few_rows_of_groups(desc, given, stream);
  const DeviceGuard guard(desc.device);
  const int multiprocessors = num_multiprocessors(desc.device);
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
