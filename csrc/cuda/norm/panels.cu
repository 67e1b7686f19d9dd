// Norms with casts in one pass. backends/cuda/build.py compiles this file once for each type of
// input of 16 bits, side by side: FP8CORE_INPUT names its enumerator.
#include <array>
#include <map>
#include <mutex>

#include "../cluster.cuh"
#include "../element.h"
#include "../residency.h"
#include "fused_from.h"
#include "panel.cuh"
#include "panel_plan.h"
#include "teams.h"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kBFloat16 or kFloat16"
#endif

namespace fp8core {
namespace {

inline ClusterLaunch in_clusters(const PanelPlan& plan, unsigned clusters, int shared, int device,
                                 cudaStream_t stream) {
  return ClusterLaunch(dim3(clusters * plan.cluster), dim3(plan.cluster), plan.kind.threads, shared,
                       device, stream);
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

template <typename T, bool kLayerNorm, int kRows, int kThreads, Granularity G>
struct Panels {
  using Shape = PanelShape<kRows, kThreads>;
  static constexpr auto kKernel = norm_panel<T, kLayerNorm, kRows, kThreads, G>;

  // Asks how many clusters of the plan the device holds; false if none.
  static bool complete(PanelPlan* plan, int chunks, int device) {
    const int shared = Shape::bytes(plan->slots, chunks);
    if (!has_clusters(device) || shared + kStatic > most_shared(device)) return false;
    allow_shared<kKernel>(shared, device);
    allow_cluster<kKernel>(plan->cluster, device);
    const ClusterLaunch launch = in_clusters(*plan, 1, shared, device, nullptr);
    const cudaError_t status =
        cudaOccupancyMaxActiveClusters(&plan->clusters, kKernel, &launch.config);
    if (status != cudaSuccess) cudaGetLastError();  // which forgets it
    return status == cudaSuccess && plan->clusters > 0;
  }

  static void launch(const PanelPlan& plan, PanelParams p, int device, cudaStream_t stream) {
    const Matrix& x = p.tile.args.x;
    const int shared = Shape::bytes(plan.slots, num_chunks(x.cols));
    allow_shared<kKernel>(shared, device);
    allow_cluster<kKernel>(plan.cluster, device);
    p.slice = plan.slice;
    p.slots = plan.slots;
    const int64_t panels = ceil_div(x.rows, kRows), each = ceil_div(panels, plan.clusters);
    const ClusterLaunch launch =
        in_clusters(plan, static_cast<unsigned>(ceil_div(panels, each)), shared, device, stream);
    FP8CORE_CUDA(cudaLaunchKernelEx(&launch.config, kKernel, p));
  }

 private:
  static constexpr int kStatic = 128;  // bytes of shared memory that the kernel declares, or more
};

// What is asked of the panels of each granularity, if no choice is made; without a wish, two passes
// over x are faster. Three blocks on a multiprocessor wait less for their clusters than two that
// copy ahead; clusters of up to 8 blocks fit anywhere on the device.
template <Granularity G>
struct PanelKinds;
template <>
struct PanelKinds<Granularity::kDelayed> {
  static constexpr std::initializer_list<PanelKind> kKinds = {{32, 256}};
  static constexpr std::initializer_list<PanelWish> kWishes = {{3, 8, false}};
};
template <>
struct PanelKinds<Granularity::kVec128> {
  static constexpr std::initializer_list<PanelKind> kKinds = {};
  static constexpr std::initializer_list<PanelWish> kWishes = {};
};

// Returns run(the panels of a kind), which G has.
template <typename T, bool kLayerNorm, Granularity G, typename Run>
auto with_kind(const PanelKind& kind, const Run& run) {
  if constexpr (G == Granularity::kVec128) {
    if (kind.threads == 512) return run(Panels<T, kLayerNorm, kTile, 512, G>{});
    return run(Panels<T, kLayerNorm, kTile, 256, G>{});
  } else {
    if (kind.rows == 32) return run(Panels<T, kLayerNorm, 32, 256, G>{});
    return run(Panels<T, kLayerNorm, 64, 256, G>{});
  }
}

template <typename T, bool kLayerNorm, Granularity G>
PanelPlan find_plan(const QuantizeNormDesc& desc, int chunks) {
  const auto passes_of = [&](const PanelKind& kind, int slice) {
    return with_kind<T, kLayerNorm, G>(
        kind, [&](auto panels) { return decltype(panels)::Shape::passes(slice); });
  };
  const auto bytes_of = [&](const PanelKind& kind, int slots) {
    return with_kind<T, kLayerNorm, G>(
        kind, [&](auto panels) { return decltype(panels)::Shape::bytes(slots, chunks); });
  };
  const auto complete = [&](PanelPlan* plan) {
    return with_kind<T, kLayerNorm, G>(
        plan->kind, [&](auto panels) { return panels.complete(plan, chunks, desc.norm.device); });
  };
  if (desc.panel.rows == 0)
    return plan_panels(PanelKinds<G>::kKinds, PanelKinds<G>::kWishes, chunks, passes_of, bytes_of,
                       complete);
  PanelPlan plan;
  plan.kind = {desc.panel.rows, desc.panel.threads};
  plan.cluster = std::min(desc.panel.cluster, chunks);
  plan.slice = (chunks + plan.cluster - 1) / plan.cluster;
  plan.slots = passes_of(plan.kind, plan.slice) + desc.panel.slots_ahead;
  FP8CORE_CHECK(complete(&plan), "quantize_norm: the device holds no cluster of ", plan.cluster,
                " blocks for panels of ", plan.kind.rows, " x ", chunks * kChunk);
  return plan;
}

// find_plan asks the device, so each answer is kept.
template <typename T, bool kLayerNorm, Granularity G>
PanelPlan plan_of(const QuantizeNormDesc& desc, int chunks) {
  static std::mutex mutex;
  static std::map<std::array<int, 6>, PanelPlan> known;
  const PanelChoice& panel = desc.panel;
  const std::array<int, 6> key = {desc.norm.device, chunks,        panel.rows,
                                  panel.threads,    panel.cluster, panel.slots_ahead};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto entry = known.find(key);
  if (entry != known.end()) return entry->second;
  const PanelPlan plan = find_plan<T, kLayerNorm, G>(desc, chunks);
  known.emplace(key, plan);
  return plan;
}

template <typename T, bool kLayerNorm, Granularity G>
bool launch_panels(const QuantizeNormDesc& desc, const PanelParams& p, cudaStream_t stream) {
  const PanelPlan plan = plan_of<T, kLayerNorm, G>(desc, num_chunks(p.tile.args.x.cols));
  if (plan.kind.rows == 0) return false;
  with_kind<T, kLayerNorm, G>(
      plan.kind, [&](auto panels) { panels.launch(plan, p, desc.norm.device, stream); });
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
