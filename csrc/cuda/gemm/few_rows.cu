// Products of few rows, of one type of a: backends/cuda/build.py compiles this file once for each,
// side by side.
#include "few_rows.cuh"

#include "../residency.h"

#ifndef FP8CORE_A
#error "compile with -DFP8CORE_A=kE4M3, kBFloat16 or kFloat16"
#endif

namespace fp8core::few_rows {
namespace {

constexpr ElementType kA = ElementType::FP8CORE_A;

template <int kCut, bool kHasBlocks, typename Run>
auto with_rows(int m, const Run& run) {
  if (m <= 8) return run(Tile<kCut, 1, kA, kHasBlocks>{});
  if (m <= 16) return run(Tile<kCut, 2, kA, kHasBlocks>{});
  if (m <= 32) return run(Tile<kCut, 4, kA, kHasBlocks>{});
  return run(Tile<kCut, 8, kA, kHasBlocks>{});
}

// Calls `run` with the tile of a cut, for so many rows and such scales.
template <int kCut = 0, typename Run>
auto with_tile(int cut, int m, bool has_blocks, const Run& run) {
  if constexpr (kCut + 1 < kNumCuts)
    if (cut != kCut) return with_tile<kCut + 1>(cut, m, has_blocks, run);
  return has_blocks ? with_rows<kCut, true>(m, run) : with_rows<kCut, false>(m, run);
}

}  // namespace

template <>
int shared_bytes<kA>(int cut, int m, bool has_blocks) {
  return with_tile(cut, m, has_blocks, [](auto tile) { return decltype(tile)::kShared; });
}

template <>
void launch<kA>(const FewRowsWay& way, bool has_blocks, const Params& params, int device,
                cudaStream_t stream) {
  const DeviceGuard guard(device);
  with_tile(way.cut, params.m, has_blocks, [&](auto tile) {
    using T = decltype(tile);
    constexpr auto kKernel = multiply_few_rows<T>;
    allow_shared<kKernel>(T::kShared, device);
    const unsigned columns = (params.n + T::kColumns - 1) / T::kColumns;
    const ClusterLaunch launch(dim3(columns, way.split), dim3(1, way.split), T::kThreads,
                               T::kShared, device, stream);
    FP8CORE_CUDA(cudaLaunchKernelEx(&launch.config, kKernel, params));
  });
}

}  // namespace fp8core::few_rows
