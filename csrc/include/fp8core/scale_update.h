// Delayed scaling: newest amaxes become scales, for every slot of every state in one launch.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "fp8core/device.h"

namespace fp8core FP8CORE_EXPORTED {

// history [length, slots] and scale [slots] are updated in place; nonfinite[0] counts the newest
// amaxes that were inf or NaN, and may be null.
struct DelayedState {
  float* history;
  float* scale;
  const float* target;
  unsigned long long* nonfinite;
  int length, slots;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(history, scale, target, nonfinite, length, slots); }
};

// The same states, updated again and again.
struct ScaleUpdate {
  std::vector<DelayedState> states;
  bool takes_window_maximum;
  int device;
};

// A launch takes kStatesPerLaunch states.
constexpr int kStatesPerLaunch = 64;

void scale_update(const ScaleUpdate& update, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
