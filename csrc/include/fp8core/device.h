// The device and the stream that an entry works on.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "fp8core/check.h"

namespace fp8core FP8CORE_EXPORTED {

// A cudaStream_t as Python hands it over.
using StreamHandle = std::uintptr_t;

inline cudaStream_t as_stream(StreamHandle handle) {
  return reinterpret_cast<cudaStream_t>(handle);
}

// Makes `device` current for a scope; asks first, because setting costs more than asking. A thread
// that has called nothing of CUDA yet has a device but no context, which cuBLASLt does not make.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FP8CORE_CUDA(cudaGetDevice(&previous_));
    static thread_local bool has_context = false;
    if (previous_ == device && has_context) return;
    FP8CORE_CUDA(cudaSetDevice(device));
    has_context = true;
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline int num_multiprocessors(int device) {
  static std::array<std::atomic<int>, 64> known{};
  const bool is_kept = device >= 0 && device < static_cast<int>(known.size());
  int count = is_kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    FP8CORE_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    if (is_kept) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

}  // namespace fp8core FP8CORE_EXPORTED
