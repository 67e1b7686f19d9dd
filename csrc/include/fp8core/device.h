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

// A positive number of each device, which `ask` is asked for once.
class NumberOfDevices {
 public:
  template <typename Ask>
  int get(int device, const Ask& ask) {
    const bool is_kept = device >= 0 && device < static_cast<int>(known_.size());
    int number = is_kept ? known_[device].load(std::memory_order_relaxed) : 0;
    if (number == 0) {
      number = ask();
      if (is_kept) known_[device].store(number, std::memory_order_relaxed);
    }
    return number;
  }

 private:
  std::array<std::atomic<int>, 64> known_{};
};

template <cudaDeviceAttr kAttribute>
int attribute_of(int device) {
  static NumberOfDevices known;
  return known.get(device, [&] {
    int value = 0;
    FP8CORE_CUDA(cudaDeviceGetAttribute(&value, kAttribute, device));
    return value;
  });
}

inline int num_multiprocessors(int device) {
  return attribute_of<cudaDevAttrMultiProcessorCount>(device);
}

// Bytes of shared memory that a block may have.
inline int most_shared(int device) {
  return attribute_of<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device);
}

}  // namespace fp8core FP8CORE_EXPORTED
