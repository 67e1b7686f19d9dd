// The launches of cross entropy, of arguments that have been checked and that are not empty.
#pragma once

#include "fp8core/cross_entropy.h"

namespace fp8core {

void launch_cross_entropy(const CrossEntropyDesc& desc, const CrossEntropyArguments& arguments,
                          cudaStream_t stream);
void launch_cross_entropy_backward(const CrossEntropyDesc& desc,
                                   const CrossEntropyBackwardArguments& arguments,
                                   cudaStream_t stream);

}  // namespace fp8core
