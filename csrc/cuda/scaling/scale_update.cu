// The update of delayed scales, with a block of threads for each slot. Source: docs/numerics.md,
// delayed scaling.
#include <algorithm>
#include <cfloat>

#include "scale_update.h"

namespace fp8core {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;

struct Batch {
  DelayedState states[kStatesPerLaunch];
};

// Unlike fmaxf it keeps a NaN, so that a history that holds one leaves its scale alone.
__device__ float max_or_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : fmaxf(a, b); }

__global__ void __launch_bounds__(kThreads) update(const Batch batch, bool takes_window_maximum) {
  const DelayedState& state = batch.states[blockIdx.y];
  const int slot = blockIdx.x;
  if (slot >= state.slots) return;
  __shared__ float shared[kThreads / 32];
  float* history = state.history + slot;
  const float newest = history[0];
  const bool is_finite = isfinite(newest);
  const bool is_recorded = is_finite && newest > 0.0f;
  __syncthreads();  // all threads have read entry 0 before one writes it
  float window = newest;
  // h[i] = h[i + 1], one piece after the other: each is read as a whole before it is written.
  for (int start = 0; start < state.length - 1; start += kThreads * kPerThread) {
    float moved[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = start + i * kThreads + threadIdx.x;
      moved[i] = at < state.length - 1 ? history[int64_t{at + 1} * state.slots] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = start + i * kThreads + threadIdx.x;
      window = max_or_nan(window, moved[i]);
      if (is_recorded && at < state.length - 1) history[int64_t{at} * state.slots] = moved[i];
    }
    __syncthreads();
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    window = max_or_nan(window, __shfl_xor_sync(0xFFFFFFFFu, window, lane));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = window;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 0; warp < kThreads / 32; ++warp) window = max_or_nan(window, shared[warp]);
  const float amax = takes_window_maximum ? window : newest;
  if (is_recorded) history[int64_t{state.length - 1} * state.slots] = newest;
  history[0] = 0.0f;
  if (is_recorded && isfinite(amax))
    state.scale[slot] = fminf(__fdiv_rn(state.target[slot], amax), FLT_MAX);
  if (!is_finite && state.nonfinite != nullptr) atomicAdd(state.nonfinite, 1ull);
}

}  // namespace

void launch_scale_update(const ScaleUpdate& bound, cudaStream_t stream) {
  const DeviceGuard guard(bound.device);
  const std::vector<DelayedState>& states = bound.states;
  for (std::size_t first = 0; first < states.size(); first += kStatesPerLaunch) {
    const std::size_t count = std::min<std::size_t>(kStatesPerLaunch, states.size() - first);
    Batch batch;
    int slots = 0;
    for (std::size_t i = 0; i < count; ++i) {
      batch.states[i] = states[first + i];
      slots = std::max(slots, batch.states[i].slots);
    }
    if (slots == 0) continue;
    update<<<dim3(slots, static_cast<unsigned>(count)), kThreads, 0, stream>>>(
        batch, bound.takes_window_maximum);
    FP8CORE_CUDA(cudaGetLastError());
  }
}

}  // namespace fp8core
