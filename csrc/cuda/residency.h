// How many blocks of a kernel a device holds at once.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "fp8core/device.h"

namespace fp8core {

// Allows a kernel `shared` bytes of dynamic shared memory, if it has not been allowed as many. All
// kernels may take 48 KiB, which what they declare is a part of.
template <auto kKernel>
void allow_shared(std::size_t shared, int device) {
  static std::array<std::atomic<std::size_t>, 64> allowed{};
  if (shared == 0) return;
  const bool is_kept = device >= 0 && device < static_cast<int>(allowed.size());
  if (is_kept && allowed[device].load(std::memory_order_relaxed) >= shared) return;
  FP8CORE_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)));
  if (is_kept) allowed[device].store(shared, std::memory_order_relaxed);
}

// Blocks of 32 * `warps` threads on all multiprocessors; the dynamic shared memory follows from
// `warps`. All devices of a process are taken to hold as many a multiprocessor.
template <auto kKernel>
int resident_blocks(int warps, std::size_t shared, int device) {
  static std::array<std::atomic<int>, 33> known{};
  allow_shared<kKernel>(shared, device);
  int blocks = known[warps].load(std::memory_order_relaxed);
  if (blocks == 0) {
    FP8CORE_CUDA(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, 32 * warps, shared));
    FP8CORE_CHECK(blocks > 0, "a kernel of ", 32 * warps, " threads and ", shared,
                  " bytes of shared memory does not fit the device");
    known[warps].store(blocks, std::memory_order_relaxed);
  }
  return blocks * num_multiprocessors(device);
}

}  // namespace fp8core
