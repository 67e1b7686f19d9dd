// The kernels that read float16.
#include "entry.h"
#include "launch.cuh"

namespace fp8core {

void launch_from_float16(const QuantizeDesc& desc, const TileParams& params,
                         int num_multiprocessors, cudaStream_t stream) {
  launch<__half>(desc, params, num_multiprocessors, stream);
}

void launch_pair_from_float16(const QuantizeDesc& desc, const TileParams& params,
                              const TileParams& other, int num_multiprocessors,
                              cudaStream_t stream) {
  launch_pair<__half>(desc, params, other, num_multiprocessors, stream);
}

int partials_from_float16(const Matrix& x, bool vectors, float* partials, int num_multiprocessors,
                          cudaStream_t stream) {
  return launch_partials<__half>(x, vectors, partials, num_multiprocessors, stream);
}

}  // namespace fp8core
