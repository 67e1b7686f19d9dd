// The device that an entry works on.
#pragma once

#include <cstdint>

#include "fp8core/check.h"

namespace fp8core {

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

inline cudaStream_t as_stream(std::uintptr_t handle) {
  return reinterpret_cast<cudaStream_t>(handle);
}

template <typename T>
T* as_pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace fp8core
