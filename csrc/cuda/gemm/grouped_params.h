// What the host hands the grouped kernels, which take it as one parameter in constant memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "fp8core/gemm.h"

namespace fp8core {

constexpr int kGroupsPerLaunch = 64;

struct GroupedParams {
  CUtensorMap a;
  CUtensorMap b[kGroupsPerLaunch];  // contracted: the first alone
  const float* b_scale[kGroupsPerLaunch];
  const void* bias[kGroupsPerLaunch];
  void* d[kGroupsPerLaunch];  // stacked: the first alone
  const std::int64_t* offsets;
  const float* a_scale;
  // Where the scale of (row, block of k, group) is: floats from one to the next, 0 where there is
  // one scale for all.
  std::int64_t a_row_stride, a_k_stride, a_group_stride;
  std::int64_t b_row_stride, b_k_stride, b_group_stride;
  int m, n, k;
  int scale_blocks;        // along k, that there are
  int groups;              // all of them
  int first_group, count;  // those of this launch
  ElementType out, bias_type;
  bool a_in_blocks, b_in_blocks;  // a scale for 128 rows
  bool contracts, accumulate, has_bias, takes_tail;
};

// How the products of 128 elements of k become a sum.
enum class Accumulation {
  kTensorCore,  // in the tensor core's accumulator
  kFloat32,     // added in float32
  kRowScales,   // times a scale a row of a and one for all of the tile's rows of b, in float32
  kBothScales   // times a scale a row of a and a scale a row of b, in float32
};

struct GroupedLaunch {
  Accumulation accumulation;
  bool is_tall;  // tiles of 256 x 128, else 128 x 128
  int blocks;
};

#define FP8CORE_FORMATS(name) \
  void launch_grouped_##name(const GroupedParams&, const GroupedLaunch&, cudaStream_t);
FP8CORE_FORMATS(e4m3_e4m3)
FP8CORE_FORMATS(e5m2_e4m3)
FP8CORE_FORMATS(e4m3_e5m2)
#undef FP8CORE_FORMATS

}  // namespace fp8core
