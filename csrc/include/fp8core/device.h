// The device that an entry works on.
#pragma once

#include <cstdint>

#include "fp8core/check.h"

namespace fp8core {

// Makes `device` current for a scope; asks first, because setting costs more than asking.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FP8CORE_CUDA(cudaGetDevice(&previous_));
    if (previous_ == device) return;
    FP8CORE_CUDA(cudaSetDevice(device));
    changed_ = true;
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
