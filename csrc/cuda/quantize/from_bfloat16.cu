// The kernels that read bfloat16.
#include "entry.h"
#include "launch.cuh"

namespace fp8core {

void launch_from_bfloat16(const QuantizeDesc& desc, const TileParams& params,
                          int num_multiprocessors, cudaStream_t stream) {
  launch<__nv_bfloat16>(desc, params, num_multiprocessors, stream);
}

void launch_pair_from_bfloat16(const QuantizeDesc& desc, const TileParams& params,
                               const TileParams& other, int num_multiprocessors,
                               cudaStream_t stream) {
  launch_pair<__nv_bfloat16>(desc, params, other, num_multiprocessors, stream);
}

int partials_from_bfloat16(const Matrix& x, bool vectors, float* partials, int num_multiprocessors,
                           cudaStream_t stream) {
  return launch_partials<__nv_bfloat16>(x, vectors, partials, num_multiprocessors, stream);
}

}  // namespace fp8core
