// The router of a mixture of experts: scores of logits [tokens, experts], the experts with the
// highest ones, their probabilities; and the gradient. Float32 arithmetic.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

enum class ScoreFunction { kSoftmax, kSigmoid, kSqrtSoftplus };

constexpr std::int64_t kMostExperts = 1024;
constexpr int kMostExpertGroups = 32;

struct RouterDesc {
  InputType input;
  int topk;
  ScoreFunction function;
  bool is_pre_softmax;  // softmax over all experts
  int num_groups;       // 0: experts of any group
  int group_topk;
  float scaling_factor;
  bool is_of_all;  // probabilities of all experts, float32
  int device;
};

// logits of any stride between tokens; probs, routing_map and scores are contiguous.
struct RouterArguments {
  Matrix logits;
  const void* bias = nullptr;  // [experts], or null
  InputType bias_type = InputType::kFloat32;
  void* probs = nullptr;
  bool* routing_map = nullptr;
  float* scores = nullptr;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(logits, bias, bias_type, probs, routing_map, scores); }
};

void router(const RouterDesc& desc, const RouterArguments& arguments, StreamHandle stream);

// grad_probs in the type of probs, with a stride between tokens; the others are contiguous.
struct RouterBackwardArguments {
  Matrix grad_probs;
  const bool* routing_map = nullptr;
  const float* scores = nullptr;
  void* grad_logits = nullptr;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(grad_probs, routing_map, scores, grad_logits); }
};

void router_backward(const RouterDesc& desc, const RouterBackwardArguments& arguments,
                     StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
