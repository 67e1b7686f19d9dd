// What the kernels of NVFP4 casts are launched with.
#pragma once

#include "casts.h"
#include "vectors.h"

namespace fp8core {

// One orientation of the result.
struct Nvfp4Side {
  ByteScaled out;
  float* global_scale_inv;
  const float* partials;  // largest magnitudes, of which the largest is the amax
  bool is_stochastic;
  uint2 counter;  // upper half of the noise's counter
};

struct Nvfp4Params {
  Matrix x;
  std::int64_t column_rows;  // of the columnwise operand: x.rows, and zeros
  Nvfp4Side row, column;
  uint2 key;
  float* partials;                // of x, then, kMaxPartials further, of the transformed x
  unsigned long long* nonfinite;  // grows by the NaN and inf in x, or null
  float largest, inverse_target;
  int num_partials, tile_columns;
  bool is_square, transforms, vector_loads, vector_rows, vector_columns;
};

constexpr double kE4M3Max = 448.0;

inline Nvfp4Side side_of(const ByteScaled& out, float* global_scale_inv, bool is_stochastic,
                         const Nvfp4Arguments& arguments, bool is_row) {
  const auto offset = static_cast<std::uint64_t>(arguments.offset);
  const auto low = static_cast<std::uint32_t>(offset);
  const auto high = static_cast<std::uint32_t>(offset >> 32);
  return {out, global_scale_inv, arguments.workspace, is_stochastic,
          make_uint2(low, high << 1 | (is_row ? 1u : 0u))};
}

inline Nvfp4Params nvfp4_params(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments) {
  const Matrix& x = arguments.x;
  const ByteScaled &row = arguments.rowwise, &column = arguments.columnwise;
  const auto seed = static_cast<std::uint64_t>(arguments.seed);
  Nvfp4Params params{};
  params.x = x;
  params.column_rows = rows_of_columns(arguments);
  params.row = side_of(row, arguments.row_global, desc.row_stochastic, arguments, true);
  params.column =
      side_of(column, arguments.column_global, desc.column_stochastic, arguments, false);
  params.key = make_uint2(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  params.partials = arguments.workspace;
  params.nonfinite = arguments.nonfinite;
  params.largest = static_cast<float>(kE4M3Max * desc.target);
  params.inverse_target = static_cast<float>(1.0 / desc.target);
  params.tile_columns = static_cast<int>(num_tile_columns(x));
  params.is_square = desc.is_square;
  params.transforms = desc.transforms && column.codes != nullptr;
  params.vector_loads = reads_vectors(x, desc.input);
  params.vector_rows = x.cols % 16 == 0 && is_aligned(row.codes, 8);
  params.vector_columns = params.column_rows % 32 == 0 && is_aligned(column.codes, 16);
  return params;
}

}  // namespace fp8core
