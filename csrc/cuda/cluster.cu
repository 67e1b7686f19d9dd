#include "cluster.h"

#include "fp8core/device.h"

namespace fp8core {
namespace {

// All kernels are compiled for the same architectures: this one stands for them.
__global__ void probe() {}

}  // namespace

bool has_clusters(int device) {
  static NumberOfDevices versions;
  return versions.get(device, [&] {
    const DeviceGuard guard(device);
    cudaFuncAttributes attributes;
    FP8CORE_CUDA(cudaFuncGetAttributes(&attributes, probe));
    return attributes.ptxVersion;
  }) >= 90;
}

}  // namespace fp8core
