// The router with a warp for each token: lane l holds the experts l, l + 32, ..., in registers.
//
// Experts are chosen one after the other. What they rank by becomes an unsigned number of the same
// order, in which NaN is the largest and 0 stands for an expert that was chosen.
#include "router.h"

#include "../element.h"

namespace fp8core {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kTiny = 1e-20f;

__device__ uint32_t rank_of(float x) {
  if (isnan(x)) return 0xFFFFFFFFu;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

__device__ float max_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

__device__ float load_bias(const void* from, InputType type, int at) {
  switch (type) {
    case InputType::kFloat32: return static_cast<const float*>(from)[at];
    case InputType::kBFloat16:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(from)[at]);
    default: return static_cast<float>(static_cast<const __half*>(from)[at]);
  }
}

// What has this rank; -0 became 0.
__device__ float value_of(uint32_t rank) {
  return __uint_as_float(rank & 0x80000000u ? rank & 0x7FFFFFFFu : ~rank);
}

struct Best {
  uint32_t rank;
  int expert;
};

// The expert with the highest rank, of equal ones the first; kEach ranks in each lane. All lanes
// return the same.
template <int kEach>
__device__ Best best_of(const uint32_t (&ranks)[kEach]) {
  uint32_t own = 0;
  int at = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (ranks[i] > own) {
      own = ranks[i];
      at = i;
    }
  const uint32_t best = __reduce_max_sync(kAll, own);
  const unsigned expert = own == best ? at * 32 + threadIdx.x % 32 : 0x7FFFFFFFu;
  return {best, static_cast<int>(__reduce_min_sync(kAll, expert))};
}

// Takes the expert out of the ranks of the lane that holds it.
template <int kEach>
__device__ void take(int expert, uint32_t (&ranks)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (expert == i * 32 + static_cast<int>(threadIdx.x % 32)) ranks[i] = 0;
}

// Lets experts of other groups than the best ones rank as -inf.
template <int kEach>
__device__ void keep_best_groups(const RouterDesc& desc, int experts, uint32_t (&ranks)[kEach]) {
  const int lane = threadIdx.x % 32, size = experts / desc.num_groups;
  const int count = desc.topk / desc.group_topk;
  int group_of[kEach];  // of the lane's experts
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    group_of[i] = i * 32 + lane < experts ? (i * 32 + lane) / size : -1;
  float of_lane = 0.0f;  // the sum of group `lane`
  for (int group = 0; group < desc.num_groups; ++group) {
    uint32_t members[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) members[i] = group_of[i] == group ? ranks[i] : 0;
    float sum = 0.0f;
    for (int n = 0; n < count; ++n) {
      const Best best = best_of(members);
      sum += value_of(best.rank);
      take(best.expert, members);
    }
    if (lane == group) of_lane = sum;
  }
  uint32_t groups[1] = {lane < desc.num_groups ? rank_of(of_lane) : 0};
  unsigned kept = 0;
  for (int n = 0; n < desc.group_topk; ++n) {
    const int best = best_of(groups).expert;
    kept |= 1u << best;
    take(best, groups);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (group_of[i] >= 0 && !(kept >> group_of[i] & 1u)) ranks[i] = rank_of(-INFINITY);
}

// The softmax of the values of experts in `among`, 0 for others.
template <int kEach>
__device__ void softmax(uint32_t among, float (&values)[kEach]) {
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (among >> i & 1u) largest = fmaxf(largest, values[i]);
  largest = max_of_warp(largest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    values[i] = among >> i & 1u ? expf(values[i] - largest) : 0.0f;
    sum += values[i];
  }
  sum = sum_of_warp(sum);
#pragma unroll
  for (int i = 0; i < kEach; ++i) values[i] = __fdiv_rn(values[i], sum);
}

// Whether scores are divided by their sum; those of a softmax are anyway.
__device__ bool divides(const RouterDesc& desc) {
  return desc.function != ScoreFunction::kSoftmax && (desc.is_of_all || desc.topk > 1);
}

__device__ float score_of(ScoreFunction function, float x) {
  if (function == ScoreFunction::kSigmoid) return __fdiv_rn(1.0f, 1.0f + expf(-x));
  return __fsqrt_rn(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) + (isnan(x) ? x : 0.0f));
}

template <typename T, int kEach>
__global__ void __launch_bounds__(kThreads)
    route_tokens(const __grid_constant__ RouterDesc desc,
                 const __grid_constant__ RouterArguments a) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(a.logits.cols);
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= a.logits.rows) return;
  const T* from = static_cast<const T*>(a.logits.data) + token * a.logits.stride;
  const bool is_softmax = desc.function == ScoreFunction::kSoftmax;
  const bool is_softmax_of_chosen = is_softmax && !desc.is_pre_softmax && !desc.is_of_all;
  float logits[kEach], scores[kEach];
  uint32_t present = 0;  // a bit for each expert of the lane
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_expert = i * 32 + lane < experts;
    present |= (is_expert ? 1u : 0u) << i;
    logits[i] = is_expert ? static_cast<float>(from[i * 32 + lane]) : 0.0f;
    scores[i] = logits[i];
  }
  if (is_softmax) {
    if (!is_softmax_of_chosen) softmax(present, scores);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) scores[i] = score_of(desc.function, logits[i]);
  }
  uint32_t ranks[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float ranked = scores[i];
    if (a.bias != nullptr && present >> i & 1u)
      ranked += load_bias(a.bias, a.bias_type, i * 32 + lane);
    ranks[i] = present >> i & 1u ? rank_of(ranked) : 0;
  }
  if (desc.num_groups > 0) keep_best_groups(desc, experts, ranks);
  uint32_t chosen = 0;
  for (int n = 0; n < desc.topk; ++n) {
    const int best = best_of(ranks).expert;
    if (best % 32 == lane) chosen |= 1u << (best / 32);
    take(best, ranks);
  }
  if (is_softmax_of_chosen) softmax(chosen, scores);
  const uint32_t among = desc.is_of_all ? present : chosen;
  float total = 1.0f;
  if (divides(desc)) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (among >> i & 1u) sum += scores[i];
    total = sum_of_warp(sum) + kTiny;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!(present >> i & 1u)) continue;
    const int64_t at = token * experts + i * 32 + lane;
    const bool is_chosen = chosen >> i & 1u;
    float prob = among >> i & 1u ? scores[i] : 0.0f;
    if (divides(desc)) prob = __fdiv_rn(prob, total);
    a.scores[at] = scores[i];
    a.routing_map[at] = is_chosen;
    if (desc.is_of_all)
      static_cast<float*>(a.probs)[at] = prob;
    else
      static_cast<T*>(a.probs)[at] = static_cast<T>(prob * desc.scaling_factor);
  }
}

template <typename T, int kEach>
__global__ void __launch_bounds__(kThreads)
    route_tokens_backward(const __grid_constant__ RouterDesc desc,
                          const __grid_constant__ RouterBackwardArguments a) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(a.grad_probs.cols);
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= a.grad_probs.rows) return;
  const bool is_softmax = desc.function == ScoreFunction::kSoftmax;
  const int64_t row = token * a.grad_probs.stride;
  float grads[kEach], scores[kEach];
  uint32_t present = 0, among = 0;
  float sum = 0.0f, product = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = i * 32 + lane;
    grads[i] = scores[i] = 0.0f;
    if (expert >= experts) continue;
    present |= 1u << i;
    const int64_t at = token * experts + expert;
    const bool is_among = desc.is_of_all || a.routing_map[at];
    among |= (is_among ? 1u : 0u) << i;
    scores[i] = a.scores[at];
    if (!is_among) continue;
    grads[i] = desc.is_of_all
                   ? static_cast<const float*>(a.grad_probs.data)[row + expert]
                   : static_cast<float>(static_cast<const T*>(a.grad_probs.data)[row + expert]) *
                         desc.scaling_factor;
    sum += scores[i];
    product += grads[i] * scores[i];
  }
  product = sum_of_warp(product);
  const float total = sum_of_warp(sum) + kTiny;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!(present >> i & 1u)) continue;
    const float score = scores[i];
    float grad = grads[i];
    if (is_softmax) {
      grad = score * (grad - product);
    } else {
      if (divides(desc))
        grad = among >> i & 1u ? __fdiv_rn(grad - __fdiv_rn(product, total), total) : 0.0f;
      float slope = score * (1.0f - score);
      if (desc.function == ScoreFunction::kSqrtSoftplus)
        slope = score > 0.0f ? __fdiv_rn(-expm1f(-score * score), 2.0f * score) : 0.0f;
      if (isnan(score)) slope = score;
      grad *= slope;
    }
    static_cast<T*>(a.grad_logits)[token * experts + i * 32 + lane] = static_cast<T>(grad);
  }
}

// Runs with the number of experts of a lane, of those that kernels are compiled for.
template <typename Run>
void with_experts(std::int64_t experts, const Run& run) {
  const std::int64_t each = (experts + 31) / 32;
  if (each <= 1) return run(std::integral_constant<int, 1>{});
  if (each <= 2) return run(std::integral_constant<int, 2>{});
  if (each <= 4) return run(std::integral_constant<int, 4>{});
  if (each <= 8) return run(std::integral_constant<int, 8>{});
  if (each <= 16) return run(std::integral_constant<int, 16>{});
  return run(std::integral_constant<int, 32>{});
}

}  // namespace

void launch_router(const RouterDesc& desc, const RouterArguments& a, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const auto blocks = static_cast<unsigned>((a.logits.rows + kWarps - 1) / kWarps);
  with_type(desc.input, [&](auto type) {
    with_experts(a.logits.cols, [&](auto each) {
      route_tokens<ElementOf<type()>, each()><<<blocks, kThreads, 0, stream>>>(desc, a);
    });
  });
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_router_backward(const RouterDesc& desc, const RouterBackwardArguments& a,
                            cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const auto blocks = static_cast<unsigned>((a.grad_probs.rows + kWarps - 1) / kWarps);
  with_type(desc.input, [&](auto type) {
    with_experts(a.grad_probs.cols, [&](auto each) {
      route_tokens_backward<ElementOf<type()>, each()><<<blocks, kThreads, 0, stream>>>(desc, a);
    });
  });
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
