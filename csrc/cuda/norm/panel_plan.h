// Into which clusters of blocks the panels of a norm with a cast are divided.
#pragma once

#include <initializer_list>

namespace fp8core {

// Panels of so many rows, cast by blocks of so many threads.
struct PanelKind {
  int rows, threads;
};

struct PanelPlan {
  PanelKind kind = {0, 0};  // no rows: no plan fits
  int cluster = 0;          // blocks that share a panel
  int slice = 0;            // chunks of a block, but for the last
  int slots = 0;            // passes that a block has memory for
  int clusters = 0;         // that the device holds at once
};

// What a plan has to meet.
struct PanelWish {
  int blocks;     // on a multiprocessor at once
  int cluster;    // at most
  bool is_ahead;  // a block has memory for one pass more than a panel has
};

// The first plan that meets a wish, the first wish first, and whose complete(&plan) is true, which
// finds out how many clusters the device holds. `passes_of(kind, slice)` are the passes of a slice,
// `bytes_of(kind, slots)` the shared memory of so many of them.
template <typename Passes, typename Bytes, typename Complete>
PanelPlan plan_panels(std::initializer_list<PanelKind> kinds,
                      std::initializer_list<PanelWish> wishes, int chunks, const Passes& passes_of,
                      const Bytes& bytes_of, const Complete& complete) {
  constexpr int kMultiprocessor = 228 * 1024, kReserved = 1024;
  for (const PanelWish& wish : wishes) {
    for (const PanelKind& kind : kinds) {
      const auto fits = [&](int slice) {
        const int slots = passes_of(kind, slice) + (wish.is_ahead ? 1 : 0);
        return (bytes_of(kind, slots) + kReserved) * wish.blocks <= kMultiprocessor;
      };
      int slice = 0;
      while (slice < chunks && fits(slice + 1)) ++slice;
      if (slice == 0) continue;
      PanelPlan plan;
      plan.kind = kind;
      plan.cluster = (chunks + slice - 1) / slice;
      plan.slice = (chunks + plan.cluster - 1) / plan.cluster;
      plan.slots = passes_of(kind, plan.slice) + (wish.is_ahead ? 1 : 0);
      if (plan.cluster <= wish.cluster && complete(&plan)) return plan;
    }
  }
  return {};
}

}  // namespace fp8core
