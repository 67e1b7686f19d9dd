// Clusters of thread blocks, whose shared memories are within reach of each other; and copies to
// shared memory that no thread waits for.
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

// Begins to copy 16 bytes to shared memory, or zeros if they are not wanted; both addresses are
// multiples of 16.
__device__ inline void copy_16_bytes(void* shared, const void* global, bool is_wanted) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}
// Ends a group of copies, which the next copy is not of.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` (0 or 1) of the groups that this thread began are not copied yet.
__device__ inline void wait_for_copies(int pending) {
  if (pending == 0)
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

}  // namespace fp8core
