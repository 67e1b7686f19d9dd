// The launch of kernels that walk over tiles.
#pragma once

#include <algorithm>

#include "../residency.h"
#include "tile_walk.cuh"

namespace fp8core {

// A block for each tile of a matrix; of a computation as many as the device holds at once.
template <auto kKernel, typename Source>
unsigned blocks_of_walk(const CastParams<Source>& p, int device) {
  if constexpr (is_matrix<Source>) {
    return p.tiles;
  } else {
    const int most = resident_blocks<kKernel>(kTileThreads / 32, walk_bytes<Source>, device);
    return std::min(p.tiles, static_cast<unsigned>(most));
  }
}

// `more`: the kernel's other parameters.
template <auto kKernel, typename Source, typename... More>
void launch_walk(const CastParams<Source>& p, int device, cudaStream_t stream,
                 const More&... more) {
  const unsigned blocks = blocks_of_walk<kKernel>(p, device);
  kKernel<<<blocks, kTileThreads, walk_bytes<Source>, stream>>>(p, more...);
}

}  // namespace fp8core
