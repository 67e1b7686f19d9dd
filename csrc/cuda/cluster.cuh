// Clusters of thread blocks, whose shared memories are within reach of each other.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cluster.h"

// Code for earlier devices has no instruction of clusters: a kernel that needs them is empty, and
// has_clusters says so.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FP8CORE_HAS_CLUSTERS 1
#endif

namespace fp8core {

// The blocks of a cluster along y, which a constant says are one where there are no clusters.
__device__ inline int blocks_of_split() {
#ifdef FP8CORE_HAS_CLUSTERS
  return gridDim.y;
#else
  return 1;
#endif
}

// The configuration of a launch of `grid` blocks, in clusters of `cluster`; of one block where
// there are no clusters.
struct ClusterLaunch {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};

  ClusterLaunch(dim3 grid, dim3 cluster, int threads, std::size_t shared, int device,
                cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = has_clusters(device) ? 1 : 0;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // whose configuration would name this attribute
};

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline unsigned cluster_blocks() {
  unsigned blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// The barrier of all threads of a cluster, in two steps. What was written before the first is seen
// after the second.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
// Where block `rank` has what this block has at `shared`.
__device__ inline uint32_t address_in_block(const void* shared, unsigned rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(shared_address(shared)), "r"(rank));
  return there;
}

// A barrier in shared memory at which one thread says how many bytes are to come. Other blocks see
// it after the cluster's barrier.
__device__ inline void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the bytes of phase 0, 1, 2 ... have come, of which `parity` is the last bit.
__device__ inline void wait_for_bytes(uint64_t* barrier, unsigned parity) {
  const uint32_t at = shared_address(barrier);
  uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(at), "r"(parity)
        : "memory");
  }
}

// Begins to store `value` where block `rank` has what this block has at `shared`. It counts as four
// bytes at that block's `barrier` when it is there.
__device__ inline void store_in_block(float* shared, uint64_t* barrier, unsigned rank,
                                      float value) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address_in_block(shared, rank)),
      "f"(value), "r"(address_in_block(barrier, rank))
      : "memory");
}

// The float that block `rank` has where this block has `shared`.
__device__ inline float load_from_block(const float* shared, unsigned rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(value)
               : "r"(address_in_block(shared, rank))
               : "memory");
  return value;
}

// Stores `value` where block `rank` has what this block has at `shared`.
__device__ inline void store_in_block(int* shared, unsigned rank, int value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in_block(shared, rank)), "r"(value)
               : "memory");
}

}  // namespace fp8core
