// Norms with casts in one pass. backends/cuda/build.py compiles this file once for each type of
// input of 16 bits, side by side: FP8CORE_INPUT names its enumerator.
#include <map>
#include <mutex>
#include <tuple>

#include "../element.h"
#include "fused_from.h"
#include "panel.cuh"
#include "panel_plan.h"
#include "residency.h"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kBFloat16 or kFloat16"
#endif

namespace fp8core {
namespace {

// A launch in clusters; `attribute` must live until it.
inline cudaLaunchConfig_t in_clusters(const PanelPlan& plan, unsigned panels, int shared,
                                      cudaLaunchAttribute* attribute, cudaStream_t stream) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = plan.cluster;
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(panels * plan.cluster);
  config.blockDim = dim3(kPanelThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

template <auto kKernel>
void allow_cluster(int cluster, int device) {
  constexpr int kAlways = 8;
  static std::array<std::atomic<bool>, 64> allowed{};
  const bool is_kept = device >= 0 && device < static_cast<int>(allowed.size());
  if (cluster <= kAlways || (is_kept && allowed[device].load(std::memory_order_relaxed))) return;
  FP8CORE_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  if (is_kept) allowed[device].store(true, std::memory_order_relaxed);
}

template <typename T, bool kLayerNorm, int kRows, Granularity G>
struct Panels {
  static constexpr auto kKernel = norm_panel<T, kLayerNorm, kRows, G>;
  static int bytes(int slice, int chunks) { return PanelShape<kRows>::bytes(slice, chunks); }

  // Whether the device holds a cluster of the plan.
  static bool is_possible(const PanelPlan& plan, int chunks, int device) {
    const int shared = bytes(plan.slice, chunks);
    int most = 0;
    FP8CORE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (shared > most) return false;
    allow_shared<kKernel>(shared, device);
    allow_cluster<kKernel>(plan.cluster, device);
    cudaLaunchAttribute attribute;
    const auto config = in_clusters(plan, 1, shared, &attribute, nullptr);
    int clusters = 0;
    const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
    if (status != cudaSuccess) cudaGetLastError();  // which forgets it
    return status == cudaSuccess && clusters > 0;
  }

  static void launch(const PanelPlan& plan, PanelParams p, int device, cudaStream_t stream) {
    const Matrix& x = p.tile.args.x;
    const int shared = bytes(plan.slice, num_chunks(x.cols));
    allow_shared<kKernel>(shared, device);
    allow_cluster<kKernel>(plan.cluster, device);
    p.slice = plan.slice;
    const auto panels = static_cast<unsigned>((x.rows + kRows - 1) / kRows);
    cudaLaunchAttribute attribute;
    const auto config = in_clusters(plan, panels, shared, &attribute, stream);
    FP8CORE_CUDA(cudaLaunchKernelEx(&config, kKernel, p));
  }
};

// Returns run(the panels of so many rows), which G has.
template <typename T, bool kLayerNorm, Granularity G, typename Run>
auto with_rows(int rows, const Run& run) {
  if constexpr (G == Granularity::kVec128)
    return run(Panels<T, kLayerNorm, kTile, G>{});
  else if (rows == 32)
    return run(Panels<T, kLayerNorm, 32, G>{});
  else
    return run(Panels<T, kLayerNorm, 64, G>{});
}

template <typename T, bool kLayerNorm, Granularity G>
PanelPlan find_plan(const QuantizeNormDesc& desc, int chunks) {
  const int device = desc.norm.device;
  const auto bytes_of = [&](int rows, int slice) {
    return with_rows<T, kLayerNorm, G>(rows,
                                       [&](auto panels) { return panels.bytes(slice, chunks); });
  };
  const auto is_possible = [&](const PanelPlan& plan) {
    return with_rows<T, kLayerNorm, G>(
        plan.rows, [&](auto panels) { return panels.is_possible(plan, chunks, device); });
  };
  if (desc.panel_rows != 0) {
    const int cluster = std::min(desc.cluster, chunks);
    const PanelPlan plan = {desc.panel_rows, cluster, (chunks + cluster - 1) / cluster};
    FP8CORE_CHECK(is_possible(plan), "quantize_norm: the device holds no cluster of ", cluster,
                  " blocks for panels of ", plan.rows, " x ", chunks * kChunk);
    return plan;
  }
  if (G == Granularity::kVec128) return plan_panels({kTile}, chunks, bytes_of, is_possible);
  return plan_panels({64, 32}, chunks, bytes_of, is_possible);
}

// find_plan asks the device, so each answer is kept.
template <typename T, bool kLayerNorm, Granularity G>
PanelPlan plan_of(const QuantizeNormDesc& desc, int chunks) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, int, int>, PanelPlan> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] =
      known.try_emplace({desc.norm.device, chunks, desc.panel_rows, desc.cluster});
  if (is_new) {
    try {
      entry->second = find_plan<T, kLayerNorm, G>(desc, chunks);
    } catch (...) {
      known.erase(entry);
      throw;
    }
  }
  return entry->second;
}

template <typename T, bool kLayerNorm, Granularity G>
bool launch_panels(const QuantizeNormDesc& desc, const PanelParams& p, cudaStream_t stream) {
  const PanelPlan plan = plan_of<T, kLayerNorm, G>(desc, num_chunks(p.tile.args.x.cols));
  if (plan.rows == 0) return false;
  with_rows<T, kLayerNorm, G>(
      plan.rows, [&](auto panels) { panels.launch(plan, p, desc.norm.device, stream); });
  return true;
}

template <typename T, bool kLayerNorm>
bool launch_kind(const QuantizeNormDesc& desc, const PanelParams& p, cudaStream_t stream) {
  return desc.cast.granularity == Granularity::kDelayed
             ? launch_panels<T, kLayerNorm, Granularity::kDelayed>(desc, p, stream)
             : launch_panels<T, kLayerNorm, Granularity::kVec128>(desc, p, stream);
}

}  // namespace

template <typename T>
bool PanelsFrom<T>::launch(const QuantizeNormDesc& desc, PanelParams p, cudaStream_t stream) {
  return desc.norm.kind == NormKind::kLayerNorm ? launch_kind<T, true>(desc, p, stream)
                                                : launch_kind<T, false>(desc, p, stream);
}

template struct PanelsFrom<ElementOf<InputType::FP8CORE_INPUT>>;

}  // namespace fp8core
