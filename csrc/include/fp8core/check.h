// Checks of the native entries. A failed one becomes a Python ValueError that says what was
// checked, the value, and the values that are accepted; an error of CUDA or cuBLASLt a
// RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <string>

// Behind the name of a namespace in a header of entries: the bindings, which are another library,
// find what it declares. Everything else is hidden.
#define FP8CORE_EXPORTED __attribute__((visibility("default")))

namespace fp8core {

template <typename... Words>
std::string join(const Words&... words) {
  std::ostringstream text;
  (text << ... << words);
  return text.str();
}

}  // namespace fp8core

#define FP8CORE_CHECK(condition, ...)                                          \
  do {                                                                         \
    if (!(condition)) throw std::invalid_argument(fp8core::join(__VA_ARGS__)); \
  } while (false)

// A tensor that stands for another, as a wrapper or a lazy one does, has the address 0, which a
// kernel must not be given.
#define FP8CORE_CHECK_ADDRESS(pointer, ...)        \
  FP8CORE_CHECK((pointer) != nullptr, __VA_ARGS__, \
                " is not empty and has the address 0: a tensor without memory of its own")

#define FP8CORE_CUDA(call)                                                               \
  do {                                                                                   \
    const cudaError_t status_ = (call);                                                  \
    if (status_ != cudaSuccess)                                                          \
      throw std::runtime_error(fp8core::join(#call, ": ", cudaGetErrorString(status_))); \
  } while (false)
