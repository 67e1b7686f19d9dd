// The sums over the rows of x [rows, cols], float32: the gradient of a bias.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

struct ColumnSumsDesc {
  InputType input;
  int device;

  // Floats of the workspace for x [rows, cols]: 0 where one launch does it.
  std::int64_t workspace_floats(std::int64_t rows, std::int64_t cols) const;
};

struct ColumnSumsArguments {
  Matrix x;
  float* sums = nullptr;       // [cols]
  float* workspace = nullptr;  // workspace_floats, null for none

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(x, sums, workspace); }
};

// Adds in an order that follows from the number of rows alone: not from addresses, strides or the
// device. Two launches where there is a workspace, else one; none if x has no elements.
void column_sums(const ColumnSumsDesc& desc, const ColumnSumsArguments& arguments,
                 StreamHandle stream);

// The tile_sums of a tensor whose parts were cast one after the other (quantize_and_sum).
struct AddTileSumsArguments {
  const float* tile_sums = nullptr;
  std::int64_t rows = 0, cols = 0;  // of the tensor
  float* sums = nullptr;            // [cols]

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(tile_sums, rows, cols, sums); }
};

void add_tile_sums(const AddTileSumsArguments& arguments, int device, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
