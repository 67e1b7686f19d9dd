// Routes of tokens to the rows of experts, and rows sent along them.
//
// A route is index [tokens, slots], the row of each slot or a negative number, and its inverse
// sources [rows], token * slots + slot or a negative number; both contiguous. Their numbers are not
// trusted: whatever they are, no address outside of the tensors follows from them.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

// Of one token; they are listed in shared memory.
constexpr std::int64_t kMostSlots = 2048;

// routing [tokens, slots], contiguous, of elements of `bytes` (1, 2, 4 or 8): not 0 where a token
// goes to an expert. workspace: route_workspace_ints(tokens, slots). One launch of a small mask,
// three of others.
struct MaskRouteArguments {
  const void* routing = nullptr;
  int bytes = 1;
  std::int64_t tokens = 0, slots = 0, rows = 0;
  std::int32_t *index = nullptr, *sources = nullptr, *workspace = nullptr;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(routing, bytes, tokens, slots, rows, index, sources, workspace); }
};

std::int64_t route_workspace_ints(std::int64_t tokens, std::int64_t slots);
void route_by_mask(const MaskRouteArguments& arguments, int device, StreamHandle stream);

// The route whose rows are given, int32 or int64 [entries]; numbers that are no rows become -1.
struct RowRouteArguments {
  const void* routing = nullptr;
  bool is_long = false;
  std::int64_t entries = 0, rows = 0;
  std::int32_t *index = nullptr, *sources = nullptr;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(routing, is_long, entries, rows, index, sources); }
};

void route_by_rows(const RowRouteArguments& arguments, int device, StreamHandle stream);

struct RowsDesc {
  InputType input;
  int device;
};

// y [rows, cols], contiguous, row d of token sources[d] / slots; zeros where there is none.
// probs [tokens, slots] of elements of prob_bytes (2, 4 or 8), permuted [rows]; both may be null.
struct DispatchArguments {
  Matrix x;
  const std::int32_t *index = nullptr, *sources = nullptr;
  std::int64_t slots = 0, rows = 0;
  void* y = nullptr;
  const void* probs = nullptr;
  void* permuted = nullptr;
  int prob_bytes = 4;
  bool skips_improbable = false;

  static constexpr int kOptional = 4;
  auto fields() {
    return std::tie(x, index, sources, slots, rows, y, probs, permuted, prob_bytes,
                    skips_improbable);
  }
};

void dispatch_rows(const RowsDesc& desc, const DispatchArguments& arguments, StreamHandle stream);

// y [tokens, cols], contiguous: the sum of each token's rows of x, by weights [tokens, slots], null
// for none; added in float32 in the order of the slots. row_values [x.rows] of elements of
// value_bytes (2, 4 or 8), values [tokens, slots]; both may be null.
struct CombineArguments {
  Matrix x;
  const std::int32_t* index = nullptr;
  std::int64_t tokens = 0, slots = 0;
  void* y = nullptr;
  const void* weights = nullptr;
  InputType weight_type = InputType::kFloat32;
  const void* row_values = nullptr;
  void* values = nullptr;
  int value_bytes = 4;

  static constexpr int kOptional = 5;
  auto fields() {
    return std::tie(x, index, tokens, slots, y, weights, weight_type, row_values, values,
                    value_bytes);
  }
};

void combine_rows(const RowsDesc& desc, const CombineArguments& arguments, StreamHandle stream);

// grad_x [rows, cols] and grad_weights [tokens, slots], float32, both contiguous, of a grad
// [tokens, cols] and the arguments of combine_rows.
struct CombineBackwardArguments {
  Matrix grad, x;
  const std::int32_t *index = nullptr, *sources = nullptr;
  std::int64_t slots = 0;
  const void* weights = nullptr;
  InputType weight_type = InputType::kFloat32;
  void* grad_x = nullptr;
  float* grad_weights = nullptr;

  static constexpr int kOptional = 0;
  auto fields() {
    return std::tie(grad, x, index, sources, slots, weights, weight_type, grad_x, grad_weights);
  }
};

void combine_rows_backward(const RowsDesc& desc, const CombineBackwardArguments& arguments,
                           StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
