// The launch of attention of one query a sequence.
#pragma once

#include "fp8core/attention.h"

namespace fp8core {

// Of arguments that have been checked, with at least one sequence.
void launch_single_query(const SingleQueryDesc& desc, const SingleQueryArguments& arguments,
                         cudaStream_t stream);

}  // namespace fp8core
