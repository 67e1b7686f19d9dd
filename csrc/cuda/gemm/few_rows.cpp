// Which products of few rows there are kernels for, and how their work is cut.
#include "few_rows.h"

#include "../cluster.h"
#include "fp8core/device.h"

#include <algorithm>
#include <cstring>

namespace fp8core {
namespace {

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

}  // namespace

std::vector<FewRowsWay> few_rows_ways(const GemmDesc& desc, int device) {
  std::vector<FewRowsWay> ways;
  if (!is_of_few_rows(desc)) return ways;
  const std::int64_t blocks = (desc.k + few_rows::kBlockK - 1) / few_rows::kBlockK;
  for (int cut = 0; cut < kNumCuts; ++cut) {
    if (!fits(desc, cut, device)) continue;
    const std::int64_t tiles = (desc.n + kCuts[cut].columns() - 1) / kCuts[cut].columns();
    const auto has_work = [&](int split) {
      return split <= most_split(device) && split * kCuts[cut].warps_k <= blocks;
    };
    // A block for at least every other multiprocessor, and twice as many where some have none.
    int split = 1;
    while (2 * tiles * split < num_multiprocessors(device) && has_work(2 * split)) split *= 2;
    ways.push_back({cut, split});
    if (tiles * split < num_multiprocessors(device) && has_work(2 * split))
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

}  // namespace fp8core
