// Clusters of thread blocks, whose shared memories are within reach of each other.
#pragma once

#include <cstdint>

namespace fp8core {

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

// Stores `value` where block `rank` has what this block has at `shared`.
__device__ inline void store_in_block(float* shared, unsigned rank, float value) {
  const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

}  // namespace fp8core
