// The launches of the router, of arguments that have been checked and that are not empty.
#pragma once

#include "fp8core/router.h"

namespace fp8core {

void launch_router(const RouterDesc& desc, const RouterArguments& arguments, cudaStream_t stream);
void launch_router_backward(const RouterDesc& desc, const RouterBackwardArguments& arguments,
                            cudaStream_t stream);

}  // namespace fp8core
