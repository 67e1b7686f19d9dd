// Grouped products of e5m2 by e4m3.
#include "sm90_grouped.cuh"

namespace fp8core {

void launch_grouped_e5m2_e4m3(const GroupedParams& params, const GroupedLaunch& launch,
                              cudaStream_t stream) {
  sm90::launch<Format::kE5M2, Format::kE4M3>(params, launch, stream);
}

}  // namespace fp8core
