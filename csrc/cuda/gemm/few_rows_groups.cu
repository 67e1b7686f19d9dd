// Products of few rows a group by codes alone, of one type of a: backends/cuda/build.py compiles
// this file once for each, side by side.
#include <algorithm>

#include "../residency.h"
#include "few_rows.cuh"

#ifndef FP8CORE_A
#error "compile with -DFP8CORE_A=kBFloat16 or kFloat16"
#endif

namespace fp8core::few_rows {
namespace {

constexpr ElementType kA = ElementType::FP8CORE_A;

template <typename T>
void launch_tiles(int split, const GroupsParams& params, int device, cudaStream_t stream) {
  constexpr auto kKernel = multiply_few_rows_of_groups<T>;
  allow_shared<kKernel>(T::kShared, device);
  const unsigned columns = (params.product.n + T::kColumns - 1) / T::kColumns;
  const unsigned groups = std::min(params.count, params.rows) + (params.takes_tail ? 1 : 0);
  const ClusterLaunch launch(dim3(columns, split, groups), dim3(1, split), T::kThreads, T::kShared,
                             device, stream);
  FP8CORE_CUDA(cudaLaunchKernelEx(&launch.config, kKernel, params));
}

template <bool kHasBlocks>
void launch_rows(int rows, int split, const GroupsParams& params, int device, cudaStream_t stream) {
  constexpr int kCut = kCutOfGroups;
  const auto run = rows <= 8    ? launch_tiles<Tile<kCut, 1, kA, kHasBlocks>>
                   : rows <= 16 ? launch_tiles<Tile<kCut, 2, kA, kHasBlocks>>
                   : rows <= 32 ? launch_tiles<Tile<kCut, 4, kA, kHasBlocks>>
                                : launch_tiles<Tile<kCut, 8, kA, kHasBlocks>>;
  run(split, params, device, stream);
}

}  // namespace

template <>
void launch_groups<kA>(int rows, int split, bool has_blocks, const GroupsParams& params, int device,
                       cudaStream_t stream) {
  const DeviceGuard guard(device);
  const auto run = has_blocks ? launch_rows<true> : launch_rows<false>;
  run(rows, split, params, device, stream);
}

}  // namespace fp8core::few_rows
