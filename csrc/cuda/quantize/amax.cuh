// The amax of a matrix. Each block of threads writes the amax of its share, a partial; a kernel
// that needs the amax reduces the partials. Without atomics nothing has to be zeroed first, and
// launches on two streams share no memory.
#pragma once

#include "numerics.cuh"

namespace fp8core {

constexpr int kAmaxThreads = 512;

template <typename T>
__global__ void __launch_bounds__(kAmaxThreads)
    amax_partials(const T* x, int64_t rows, int64_t cols, int64_t stride, bool vectors,
                  float* partials) {
  __shared__ float shared[kAmaxThreads / 32];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAmaxThreads;
  int64_t at = static_cast<int64_t>(blockIdx.x) * kAmaxThreads + threadIdx.x;
  float largest = 0.0f;
  if (vectors) {
    const int64_t per_row = cols / 8, total = rows * per_row;
    const auto where = [&](int64_t index) {
      return rows == 1 ? x + index * 8 : x + index / per_row * stride + index % per_row * 8;
    };
    for (; at + 3 * step < total; at += 4 * step) {  // four loads in flight
      Eight<T> loaded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) loaded[i].load_kept(where(at + i * step));
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, loaded[i].amax());
    }
    for (; at < total; at += step) {
      Eight<T> loaded;
      loaded.load_kept(where(at));
      largest = fmaxf(largest, loaded.amax());
    }
  } else {
    for (; at < rows * cols; at += step)
      largest = fmaxf(largest, fabsf(static_cast<float>(x[at / cols * stride + at % cols])));
  }
  largest = block_max<kAmaxThreads>(largest, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = largest;
}

template <int kThreads>
__device__ float reduce_partials(const float* partials, int count, float* shared) {
  float largest = 0.0f;
  for (int i = threadIdx.x; i < count; i += kThreads) largest = fmaxf(largest, partials[i]);
  return block_max<kThreads>(largest, shared);
}

}  // namespace fp8core
