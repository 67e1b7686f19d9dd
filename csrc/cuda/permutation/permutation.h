// The launches of permutations, of arguments that have been checked.
#pragma once

#include "fp8core/permutation.h"

namespace fp8core {

constexpr int kTokensPerBlock = 256;  // of the kernels that count a mask
constexpr int kExpertsPerBlock = 32;

void launch_route_by_mask(const MaskRouteArguments& arguments, int device, cudaStream_t stream);
void launch_route_by_rows(const RowRouteArguments& arguments, int device, cudaStream_t stream);
void launch_dispatch(const RowsDesc& desc, const DispatchArguments& arguments, cudaStream_t stream);
void launch_combine(const RowsDesc& desc, const CombineArguments& arguments, cudaStream_t stream);
void launch_combine_backward(const RowsDesc& desc, const CombineBackwardArguments& arguments,
                             cudaStream_t stream);

}  // namespace fp8core
