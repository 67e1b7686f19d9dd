// What the kernels of a cast are launched with.
#pragma once

#include "casts.h"
#include "vectors.h"

namespace fp8core {

struct TileParams {
  QuantizeArguments args;
  ScaleRule rule;
  Format format = Format::kE4M3;
  // Of a part of the result (source.cuh), which is all of it but for gradients of two halves.
  std::int64_t part_columns = 0;
  std::int64_t column_codes = 0;  // columnwise codes in a row, without groups: x.rows, and zeros
  int tile_columns = 0;           // tiles from one end of a part's row to the other
  std::int64_t scale_tiles = 0;   // rows of tiles that have scales
  bool is_split = false;          // the parts are tensors of their own, the second one has `second`
  CastSlots second;
  bool vector_loads = false, vector_rows = false, vector_columns = false;
};

inline TileParams tile_params(const QuantizeDesc& desc, const QuantizeArguments& arguments) {
  const Matrix& x = arguments.x;
  TileParams params;
  params.args = arguments;
  params.args.column_pitch = pitch_of_columns(arguments);
  params.rule = desc.rule;
  params.format = desc.format;
  params.part_columns = x.cols;
  params.column_codes = x.rows;
  params.tile_columns = static_cast<int>(num_tile_columns(x));
  params.scale_tiles = num_tile_rows(x, arguments.groups);
  if (arguments.groups.offsets != nullptr) --params.scale_tiles;  // the tail has no scales
  params.vector_loads = reads_vectors(x, desc.input);
  params.vector_rows = x.cols % 8 == 0 && is_aligned(arguments.rowwise.codes, 8);
  params.vector_columns =
      params.args.column_pitch % 16 == 0 && is_aligned(arguments.columnwise.codes, 16);
  return params;
}

}  // namespace fp8core
