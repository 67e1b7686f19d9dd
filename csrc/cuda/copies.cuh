// Copies from global to shared memory that no thread waits for until it needs what they copy.
#pragma once

#include <cstdint>

namespace fp8core {

// Begins to copy 16 bytes, or writes zeros if they are not wanted: then nothing is read at
// `global`. Both addresses are multiples of 16.
__device__ inline void copy_16_bytes(void* shared, const void* global, bool is_wanted) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}

// The same of bytes that other warps of the multiprocessor read soon.
__device__ inline void copy_16_shared_bytes(void* shared, const void* global, bool is_wanted) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}

// The same of a float.
__device__ inline void copy_float(float* shared, const float* global, bool is_wanted) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global),
               "r"(is_wanted ? 4 : 0)
               : "memory");
}

// Ends a group of copies, which the next copy is not of.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of the groups that this thread began are not copied yet.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fp8core
