// Into which clusters of blocks the panels of a norm with a cast are divided.
#pragma once

#include <initializer_list>

#include "fp8core/device.h"

namespace fp8core {

struct PanelPlan {
  int rows = 0;     // of a panel; 0: none fits
  int cluster = 0;  // blocks that share a panel
  int slice = 0;    // chunks of a block, but for the last
};

// Which of the panels of `rows` rows (with their shared memory as bytes_of(rows, slice)) suits rows
// of `chunks` chunks, if is_possible(plan).
//
// Several blocks on a multiprocessor are what counts first: one loads while others store. Then
// clusters of up to 8 blocks, which every device of this architecture takes anywhere; and many
// rows, as a column's codes of a panel lie together.
template <typename Bytes, typename Possible>
PanelPlan plan_panels(std::initializer_list<int> rows, int chunks, const Bytes& bytes_of,
                      const Possible& is_possible) {
  constexpr int kMultiprocessor = 228 * 1024, kReserved = 1024, kMost = 16;
  const struct {
    int blocks, cluster;
  } wishes[] = {{3, 8}, {2, 8}, {3, kMost}, {2, kMost}, {1, kMost}};
  for (const auto& wish : wishes) {
    for (const int of_panel : rows) {
      int slice = 0;
      while (slice < chunks &&
             (bytes_of(of_panel, slice + 1) + kReserved) * wish.blocks <= kMultiprocessor)
        ++slice;
      if (slice == 0) continue;
      const int cluster = (chunks + slice - 1) / slice;
      const PanelPlan plan = {of_panel, cluster, (chunks + cluster - 1) / cluster};
      if (cluster <= wish.cluster && is_possible(plan)) return plan;
    }
  }
  return {};
}

}  // namespace fp8core
