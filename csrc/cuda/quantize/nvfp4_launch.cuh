// The launches of an NVFP4 cast of strips from any source.
#pragma once

#include <algorithm>

#include "nvfp4.cuh"

namespace fp8core {

// Blocks of threads that take amaxes of x.
inline unsigned amax_blocks(const Nvfp4Params& params, int multiprocessors) {
  const auto tiles = static_cast<unsigned>(num_tiles(params.x, {}));
  return std::min<unsigned>({tiles, 4u * multiprocessors, static_cast<unsigned>(kMaxPartials)});
}

// Writes the amaxes of x, and of the transformed x.
template <typename Strips>
void launch_transformed_amax(Nvfp4Params& params, const typename Strips::Inputs& inputs,
                             int multiprocessors, cudaStream_t stream) {
  const unsigned blocks = amax_blocks(params, multiprocessors);
  params.num_partials = static_cast<int>(blocks);
  params.column.partials = params.partials + kMaxPartials;
  const auto tiles = static_cast<unsigned>(num_tiles(params.x, {}));
  transformed_amax<Strips><<<blocks, kFp4Threads, 0, stream>>>(params, inputs, tiles);
}

// Writes the amaxes of x alone, which is not in memory.
template <typename Strips>
void launch_strip_partials(Nvfp4Params& params, const typename Strips::Inputs& inputs,
                           int multiprocessors, cudaStream_t stream) {
  const unsigned blocks = amax_blocks(params, multiprocessors);
  params.num_partials = static_cast<int>(blocks);
  const auto tiles = static_cast<unsigned>(num_tiles(params.x, {}));
  strip_partials<Strips><<<blocks, kFp4Threads, 0, stream>>>(params, inputs, tiles);
}

template <typename Strips>
void launch_strips(const Nvfp4Params& params, const typename Strips::Inputs& inputs,
                   int multiprocessors, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(num_tiles(params.x, {}));
  const unsigned blocks = std::min<unsigned>(tiles, Strips::kBlocks * multiprocessors);
  nvfp4_tile<Strips><<<blocks, kFp4Threads, 0, stream>>>(params, inputs, tiles);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
