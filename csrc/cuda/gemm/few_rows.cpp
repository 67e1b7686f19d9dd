// Which products of few rows there are kernels for, and how their work is cut.
#include "few_rows.h"

#include "../cluster.h"
#include "fp8core/device.h"

#include <algorithm>
#include <cstring>

namespace fp8core {
namespace {

using few_rows::Cut;
using few_rows::kCuts;
using few_rows::kNumCuts;

constexpr std::int64_t kMostRows = 64, kMostSize = std::int64_t{1} << 30;
constexpr int kVector = 16;  // bytes that a thread copies at once

// Begins the bytes of a way; another number, once ways mean something else.
constexpr char kName[] = "fp8core few rows 1";

// Blocks that share k: of a cluster, as any device has that has clusters.
int most_split(int device) { return has_clusters(device) ? 8 : 1; }

// Calls `run` with the type of a, which few_rows.cu is compiled for.
template <typename Run>
auto with_type(ElementType type, const Run& run) {
  using Type = ElementType;
  switch (type) {
    case Type::kE4M3: return run(std::integral_constant<Type, Type::kE4M3>{});
    case Type::kBFloat16: return run(std::integral_constant<Type, Type::kBFloat16>{});
    default: return run(std::integral_constant<Type, Type::kFloat16>{});
  }
}

bool is_scaled(ScaleMode mode) {
  return mode == ScaleMode::kTensor || mode == ScaleMode::kRow || has_blocks(mode);
}

bool is_in_vectors(const OperandDesc& operand, std::int64_t k) {
  const int size = operand.type == ElementType::kE4M3 ? 1 : 2;
  return operand.k_contiguous && k % kVector == 0 && operand.leading * size % kVector == 0;
}

bool is_of_few_rows(const GemmDesc& desc) {
  const OperandDesc &a = desc.a, &b = desc.b;
  const bool is_coded = a.type == ElementType::kE4M3 && is_scaled(a.scale) &&
                        has_blocks(a.scale) == has_blocks(b.scale);
  const bool is_plain = (a.type == ElementType::kBFloat16 || a.type == ElementType::kFloat16) &&
                        a.scale == ScaleMode::kNone;
  return desc.m <= kMostRows && std::max(desc.n, desc.k) < kMostSize && !desc.accumulate &&
         desc.alignment % kVector == 0 && is_in_vectors(a, desc.k) && is_in_vectors(b, desc.k) &&
         b.type == ElementType::kE4M3 && is_scaled(b.scale) && (is_coded || is_plain);
}

bool fits(const GemmDesc& desc, int cut, int device) {
  const int shared = with_type(desc.a.type, [&](auto type) {
    return few_rows::shared_bytes<type()>(cut, static_cast<int>(desc.m), has_blocks(desc.b.scale));
  });
  return shared <= most_shared(device);
}

struct Strides {
  std::int64_t row, k;
  int rows;  // that share a scale
};

Strides strides_of(ScaleMode mode, std::int64_t rows, std::int64_t blocks) {
  const auto padded = [](std::int64_t size) { return (size + 3) / 4 * 4; };
  switch (mode) {
    case ScaleMode::kRow: return {1, 0, 1};
    case ScaleMode::kVec128: return {1, padded(rows), 1};
    case ScaleMode::kBlock128: return {padded(blocks), 1, few_rows::kBlockK};
    default: return {0, 0, 1};
  }
}

bool has_work(const Cut& cut, std::int64_t k, int split, int device) {
  const std::int64_t blocks = (k + few_rows::kBlockK - 1) / few_rows::kBlockK;
  return split <= most_split(device) && split * cut.warps_k <= blocks;
}

// How many blocks of threads share a sum, so that there is one for at least every other
// multiprocessor.
int split_of(const Cut& cut, std::int64_t tiles, std::int64_t k, int device) {
  int split = 1;
  while (2 * tiles * split < num_multiprocessors(device) && has_work(cut, k, 2 * split, device))
    split *= 2;
  return split;
}

}  // namespace

std::vector<FewRowsWay> few_rows_ways(const GemmDesc& desc, int device) {
  std::vector<FewRowsWay> ways;
  if (!is_of_few_rows(desc)) return ways;
  for (int cut = 0; cut < kNumCuts; ++cut) {
    if (!fits(desc, cut, device)) continue;
    const std::int64_t tiles = (desc.n + kCuts[cut].columns() - 1) / kCuts[cut].columns();
    const int split = split_of(kCuts[cut], tiles, desc.k, device);
    ways.push_back({cut, split});
    // Twice as many blocks where multiprocessors have none.
    if (tiles * split < num_multiprocessors(device) &&
        has_work(kCuts[cut], desc.k, 2 * split, device))
      ways.push_back({cut, 2 * split});
  }
  return ways;
}

std::string few_rows_algorithm(const FewRowsWay& way) {
  std::string bytes(sizeof(cublasLtMatmulAlgo_t), '\0');
  const few_rows::Cut& cut = kCuts[way.cut];
  const int numbers[] = {cut.column_tiles, cut.warps_n, cut.warps_k, cut.stages, way.split};
  static_assert(sizeof kName + sizeof numbers <= sizeof(cublasLtMatmulAlgo_t));
  std::memcpy(bytes.data(), kName, sizeof kName);
  std::memcpy(bytes.data() + sizeof kName, numbers, sizeof numbers);
  return bytes;
}

std::optional<FewRowsWay> few_rows_way(const GemmDesc& desc, const std::string& algorithm,
                                       int device) {
  if (!is_of_few_rows(desc)) return std::nullopt;
  for (int cut = 0; cut < kNumCuts; ++cut)
    for (int split = 1; split <= most_split(device); split *= 2)
      if (algorithm == few_rows_algorithm({cut, split}) && fits(desc, cut, device))
        return FewRowsWay{cut, split};
  return std::nullopt;
}

void launch_few_rows(const GemmDesc& desc, const FewRowsWay& way, const GemmArguments& arguments,
                     int device, cudaStream_t stream) {
  const std::int64_t blocks = (desc.k + few_rows::kBlockK - 1) / few_rows::kBlockK;
  const Strides a = strides_of(desc.a.scale, desc.m, blocks);
  const Strides b = strides_of(desc.b.scale, desc.n, blocks);
  few_rows::Params p{};
  p.a = static_cast<const std::uint8_t*>(arguments.a);
  p.b = static_cast<const std::uint8_t*>(arguments.b);
  p.a_scale = arguments.a_scale_inv, p.b_scale = arguments.b_scale_inv;
  p.a_row_stride = a.row, p.a_k_stride = a.k, p.a_rows = a.rows;
  p.b_row_stride = b.row, p.b_k_stride = b.k, p.b_rows = b.rows;
  p.bias = desc.has_bias ? arguments.bias : nullptr;
  p.d = arguments.d;
  p.a_leading = desc.a.leading, p.b_leading = desc.b.leading, p.d_leading = desc.d_leading;
  p.m = static_cast<int>(desc.m), p.n = static_cast<int>(desc.n), p.k = static_cast<int>(desc.k);
  p.out = desc.out, p.bias_type = desc.bias;
  with_type(desc.a.type, [&](auto type) {
    few_rows::launch<type()>(way, has_blocks(desc.b.scale), p, device, stream);
  });
}

void launch_few_rows_of_groups(const GroupedGemmDesc& desc, const GroupedGemmArguments& given,
                               cudaStream_t stream) {
  constexpr Cut kCut = kCuts[few_rows::kCutOfGroups];
  few_rows::GroupsParams p{};
  few_rows::Params& product = p.product;
  product.a = static_cast<const std::uint8_t*>(given.a.data[0]);
  product.a_leading = given.a.pitch / 2, product.b_leading = given.b.pitch;
  product.d = given.d[0], product.d_leading = given.n;
  product.a_rows = 1, product.b_rows = desc.b_scale == ScaleMode::kBlock128 ? 128 : 1;
  if (desc.b_scale != ScaleMode::kTensor) product.b_row_stride = given.b.scale_row_stride;
  if (has_blocks(desc.b_scale)) product.b_k_stride = given.b.scale_k_stride;
  product.n = static_cast<int>(given.n), product.k = static_cast<int>(given.k);
  product.out = desc.out, product.bias_type = given.bias_type;
  p.offsets = given.offsets;
  p.rows = static_cast<int>(given.m), p.groups = static_cast<int>(given.groups);
  // Tiles of twice the rows that a group has in the mean: few groups have more.
  const int rows = static_cast<int>(std::min(given.m, 2 * (given.m / given.groups + 1)));
  const std::int64_t tiles = (given.n + kCut.columns() - 1) / kCut.columns();
  const int split = split_of(kCut, tiles * std::min(given.m, given.groups), given.k, desc.device);
  for (int first = 0; first < p.groups; first += few_rows::kMostGroups) {
    p.first_group = first, p.count = std::min(few_rows::kMostGroups, p.groups - first);
    p.takes_tail = first + p.count == p.groups;
    for (int i = 0; i < p.count; ++i) {
      p.b[i] = static_cast<const std::uint8_t*>(given.b.data[first + i]);
      p.b_scale[i] = given.b.scale_inv[first + i];
      if (!given.bias.empty()) p.bias[i] = given.bias[first + i];
    }
    const auto launch = desc.a == ElementType::kBFloat16
                            ? few_rows::launch_groups<ElementType::kBFloat16>
                            : few_rows::launch_groups<ElementType::kFloat16>;
    launch(rows, split, has_blocks(desc.b_scale), p, desc.device, stream);
  }
}

}  // namespace fp8core
