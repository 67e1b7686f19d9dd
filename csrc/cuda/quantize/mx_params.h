// What the kernels of MXFP8 casts are launched with.
#pragma once

#include "fp8core/microscaling.h"
#include "tile_params.h"

namespace fp8core {

// The scales, beside the parameters of the tiles.
struct MxParams {
  ByteScaled rowwise, columnwise;
  float inverse_target;
  bool is_square;
};

inline MxParams mx_params(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments) {
  return {arguments.rowwise, arguments.columnwise, static_cast<float>(1.0 / desc.target),
          desc.is_square};
}

inline TileParams tile_params(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments) {
  QuantizeDesc cast{};
  cast.format = desc.format;
  cast.input = desc.input;
  QuantizeArguments results;
  results.x = arguments.x;
  results.rowwise.codes = arguments.rowwise.codes;
  results.columnwise.codes = arguments.columnwise.codes;
  results.nonfinite = arguments.nonfinite;
  results.column_pitch = rows_of_columns(arguments);
  TileParams params = tile_params(cast, results);
  params.column_codes = results.column_pitch;
  return params;
}

}  // namespace fp8core
