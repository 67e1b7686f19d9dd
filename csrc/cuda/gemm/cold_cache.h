// The launch that fills a device's cache with memory that no product reads.
#pragma once

#include "fp8core/device.h"

namespace fp8core {

// `memory` at a multiple of 16 bytes; what it holds is read, and may change.
void fill_cache(void* memory, std::int64_t bytes, int device, cudaStream_t stream);

}  // namespace fp8core
