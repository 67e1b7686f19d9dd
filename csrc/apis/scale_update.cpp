// The update of delayed scales: the states are checked, then launched.
#include "fp8core/scale_update.h"

#include "../cuda/scaling/scale_update.h"

namespace fp8core {

void scale_update(const ScaleUpdate& update, StreamHandle stream) {
  for (std::size_t i = 0; i < update.states.size(); ++i) {
    const DelayedState& state = update.states[i];
    FP8CORE_CHECK(state.length >= 1, "scale_update: state ", i, " has a history of length ",
                  state.length);
    if (state.slots <= 0) continue;
    FP8CORE_CHECK_ADDRESS(state.history, "scale_update: a history");
    FP8CORE_CHECK_ADDRESS(state.scale, "scale_update: a scale");
    FP8CORE_CHECK_ADDRESS(state.target, "scale_update: a target");
  }
  launch_scale_update(update, as_stream(stream));
}

}  // namespace fp8core
