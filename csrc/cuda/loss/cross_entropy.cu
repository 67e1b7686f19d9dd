// Cross entropy with a block of threads for each row, which is read once in forward and once in
// backward. An exponential is a power of 2, one instruction, of a relative error of 2^-22. Logits
// are subtracted before they are scaled: scaled, the largest floats overflow.
#include "cross_entropy.h"

#include "../element.h"
#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"

namespace fp8core {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kAtOnce = 2;  // vectors that a thread reads at once
// Blocks of a multiprocessor: 48 KiB are on their way, in float32 64 KiB.
template <typename T>
constexpr int kBlocks = sizeof(T) == 4 ? 2 : 3;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;

__device__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, kLog2E)));
  return y;
}

// A sum of exp(x - largest), and the largest x; -inf and 0 for none.
struct Sum {
  float largest = -INFINITY, sum = 0.0f;

  // What is subtracted: 0 where all values are -inf, so that their difference is.
  __device__ static float origin(float largest) { return largest == -INFINITY ? 0.0f : largest; }

  __device__ void add(const Sum& other) {
    const float both = fmaxf(largest, other.largest), from = origin(both);
    sum = sum * exponential(largest - from) + other.sum * exponential(other.largest - from);
    largest = both;
  }
};

template <typename T>
__device__ void load_eight(const T* row, int64_t column, int64_t cols, bool is_vector,
                           Eight<T>* to) {
  if (is_vector)
    to->load(row + column);
  else
    to->gather(row + column, static_cast<int>(min(cols - column, int64_t{8})));
}

template <typename T, bool kVectors, bool kSmooth>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    log_sums(const __grid_constant__ CrossEntropyDesc desc,
             const __grid_constant__ CrossEntropyArguments a) {
  __shared__ Sum sums[kWarps];
  __shared__ float totals[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x, cols = a.x.cols;
  const T* x = static_cast<const T*>(a.x.data) + row * a.x.stride;
  // What is subtracted before values are added for their mean, so that it is as exact as they are.
  const float first = kSmooth ? static_cast<float>(x[0]) : 0.0f;
  const float base = isfinite(first) ? first : 0.0f;
  Sum own;
  float total = 0.0f;
  for (int64_t start = threadIdx.x * 8; start < cols; start += kThreads * 8 * kAtOnce) {
    Eight<T> eights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t column = start + i * kThreads * 8;
      if (column < cols) load_eight(x, column, cols, kVectors, &eights[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t column = start + i * kThreads * 8;
      if (column >= cols) break;
      const int count = kVectors ? 8 : static_cast<int>(min(cols - column, int64_t{8}));
      float largest = own.largest;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (kVectors || j < count) largest = fmaxf(largest, eights[i][j]);
      const float from = Sum::origin(largest);
      float sum = own.sum * exponential(own.largest - from);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (!kVectors && j >= count) break;
        sum += exponential(eights[i][j] - from);
        if (kSmooth) total += eights[i][j] - base;
      }
      own.largest = largest;
      own.sum = sum;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    Sum other;
    other.largest = __shfl_xor_sync(0xFFFFFFFFu, own.largest, step);
    other.sum = __shfl_xor_sync(0xFFFFFFFFu, own.sum, step);
    own.add(other);
    if (kSmooth) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
  }
  if (lane == 0) {
    sums[warp] = own;
    totals[warp] = total;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) {
    own.add(sums[i]);
    if (kSmooth) total += totals[i];
  }
  const float log_sum = log2f(own.sum) * kLn2;
  const int64_t target = a.target[row * a.target_stride];
  float loss = 0.0f;
  if (target != desc.ignore_index) {
    const bool is_class = target >= 0 && target < cols;
    loss = own.largest - (is_class ? static_cast<float>(x[target]) : -INFINITY);
    if (kSmooth) {
      const float smoothing = desc.label_smoothing;
      const float of_mean = (own.largest - base) - total / static_cast<float>(cols);
      loss = (1.0f - smoothing) * loss + smoothing * of_mean;
    }
    loss += log_sum;
  }
  a.largest[row] = own.largest;
  a.log_sum[row] = log_sum;
  a.loss[row] = loss;
}

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    gradients(const __grid_constant__ CrossEntropyDesc desc,
              const __grid_constant__ CrossEntropyBackwardArguments a) {
  const int64_t row = blockIdx.x, cols = a.x.cols;
  const T* x = static_cast<const T*>(a.x.data) + row * a.x.stride;
  T* grad_x = static_cast<T*>(a.grad_x) + row * cols;
  const int64_t target = a.target[row * a.target_stride];
  const bool is_ignored = target == desc.ignore_index;
  const float grad = a.grad[row * a.grad_stride];
  const float largest = a.largest[row], log_sum = a.log_sum[row];
  const float of_all = desc.label_smoothing / static_cast<float>(cols);
  const float of_target = 1.0f - desc.label_smoothing;
  for (int64_t start = threadIdx.x * 8; start < cols; start += kThreads * 8 * kAtOnce) {
    Eight<T> eights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t column = start + i * kThreads * 8;
      if (column < cols && !is_ignored) load_eight(x, column, cols, kVectors, &eights[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t column = start + i * kThreads * 8;
      if (column >= cols) break;
      const int64_t at = target - column;  // in 0..7 where the target is among these
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float slope = exponential(eights[i][j] - largest - log_sum) - of_all;
        if (at == j) slope -= of_target;
        values[j] = is_ignored ? 0.0f : grad * slope;
      }
      const Eight<T> result = rounded<T>(values);
      if constexpr (kVectors) {
        result.store(grad_x + column);
      } else {
        const int count = static_cast<int>(min(cols - column, int64_t{8}));
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < count) grad_x[column + j] = static_cast<T>(values[j]);
      }
    }
  }
}

}  // namespace

void launch_cross_entropy(const CrossEntropyDesc& desc, const CrossEntropyArguments& a,
                          cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const auto blocks = static_cast<unsigned>(a.x.rows);
  const bool is_vector = reads_vectors(a.x, desc.input), smooths = desc.label_smoothing > 0.0f;
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    if (is_vector && smooths)
      log_sums<T, /*kVectors=*/true, /*kSmooth=*/true><<<blocks, kThreads, 0, stream>>>(desc, a);
    else if (is_vector)
      log_sums<T, /*kVectors=*/true, /*kSmooth=*/false><<<blocks, kThreads, 0, stream>>>(desc, a);
    else if (smooths)
      log_sums<T, /*kVectors=*/false, /*kSmooth=*/true><<<blocks, kThreads, 0, stream>>>(desc, a);
    else
      log_sums<T, /*kVectors=*/false, /*kSmooth=*/false><<<blocks, kThreads, 0, stream>>>(desc, a);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_cross_entropy_backward(const CrossEntropyDesc& desc,
                                   const CrossEntropyBackwardArguments& a, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const auto blocks = static_cast<unsigned>(a.x.rows);
  const bool is_vector = reads_vectors(a.x, desc.input);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    if (is_vector)
      gradients<T, /*kVectors=*/true><<<blocks, kThreads, 0, stream>>>(desc, a);
    else
      gradients<T, /*kVectors=*/false><<<blocks, kThreads, 0, stream>>>(desc, a);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
