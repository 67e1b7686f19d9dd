// The launch of grouped products, and the kernels' parameters, which lie in constant memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "fp8core/grouped_gemm.h"
#include "fp8core/quantize.h"

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
  // Floats from the scale of one row, block of k or group to the next; 0 where one scale covers
  // all.
  std::int64_t a_row_stride, a_k_stride, a_group_stride;
  std::int64_t b_row_stride, b_k_stride, b_group_stride;
  int m, n, k;
  int scale_blocks;        // blocks along k that have scales
  int groups;              // of all launches
  int first_group, count;  // of this launch
  ElementType out, bias_type;
  bool a_in_blocks, b_in_blocks;  // one scale covers 128 rows
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

// Of arguments that have been checked, with m > 0.
void launch_grouped_gemm(const GroupedGemmDesc& desc, const GroupedGemmArguments& arguments,
                         cudaStream_t stream);

// The launch of one pair of formats, which sm90_grouped.cu compiles.
template <Format A, Format B>
void launch_grouped(const GroupedParams& params, const GroupedLaunch& launch, cudaStream_t stream);

}  // namespace fp8core
