// Steps of optimizers. A block of threads works on 16384 elements of one parameter; a launch takes
// the blocks of several parameters one behind the other. Types of elements are known at run time:
// all threads of a launch take the same branches, and the bytes are read before any is converted.
#include <algorithm>
#include <cmath>

#include "../element.h"
#include "../quantize/vectors.h"
#include "step.h"

namespace fp8core {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;  // elements that a thread works on at once
constexpr int64_t kElementsPerBlock = 16384;

struct Batch {
  StepTensors tensors[kParametersPerStep];
  unsigned first_block[kParametersPerStep + 1];
  int count;
};

// Eight elements as they lie in memory; those of 16 bits are in `low`.
struct Raw {
  uint4 low, high;
};

__device__ Raw load_raw(const void* tensor, InputType type, int64_t at, int count, bool is_vector) {
  Raw raw{};
  if (type == InputType::kFloat32) {
    const float* from = static_cast<const float*>(tensor) + at;
    if (is_vector) {
      raw.low = __ldcs(reinterpret_cast<const uint4*>(from));
      raw.high = __ldcs(reinterpret_cast<const uint4*>(from) + 1);
    } else {
      uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i] = i < count ? __float_as_uint(from[i]) : 0;
      raw.low = make_uint4(words[0], words[1], words[2], words[3]);
      raw.high = make_uint4(words[4], words[5], words[6], words[7]);
    }
    return raw;
  }
  const uint16_t* from = static_cast<const uint16_t*>(tensor) + at;
  if (is_vector) {
    raw.low = __ldcs(reinterpret_cast<const uint4*>(from));
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t first = 2 * i < count ? from[2 * i] : 0;
      const uint32_t second = 2 * i + 1 < count ? from[2 * i + 1] : 0;
      words[i] = first | second << 16;
    }
    raw.low = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return raw;
}

__device__ void store_raw(const Raw& raw, void* tensor, InputType type, int64_t at, int count,
                          bool is_vector) {
  const uint32_t words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                             raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  if (type == InputType::kFloat32) {
    uint32_t* to = static_cast<uint32_t*>(tensor) + at;
    if (is_vector) {
      __stcs(reinterpret_cast<uint4*>(to), raw.low);
      __stcs(reinterpret_cast<uint4*>(to) + 1, raw.high);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) to[i] = words[i];
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(tensor) + at;
  if (is_vector) {
    __stcs(reinterpret_cast<uint4*>(to), raw.low);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) to[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
}

__device__ uint32_t half_of(const uint4& words, int i) {
  const uint32_t word = i / 2 == 0   ? words.x
                        : i / 2 == 1 ? words.y
                        : i / 2 == 2 ? words.z
                                     : words.w;
  return i % 2 == 0 ? word & 0xFFFFu : word >> 16;
}

__device__ void to_floats(const Raw& raw, InputType type, float (&values)[kEach]) {
  if (type == InputType::kFloat32) {
    const uint32_t words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                               raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = __uint_as_float(words[i]);
  } else if (type == InputType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = __uint_as_float(half_of(raw.low, i) << 16);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      values[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(half_of(raw.low, i))));
  }
}

__device__ Raw from_halves(const uint32_t (&halves)[kEach]) {
  Raw raw{};
  raw.low = make_uint4(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16,
                       halves[4] | halves[5] << 16, halves[6] | halves[7] << 16);
  return raw;
}

// Each rounded once, to the nearest, ties to even.
__device__ Raw from_floats(const float (&values)[kEach], InputType type) {
  if (type == InputType::kFloat32) {
    Raw raw;
    raw.low = make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                         __float_as_uint(values[2]), __float_as_uint(values[3]));
    raw.high = make_uint4(__float_as_uint(values[4]), __float_as_uint(values[5]),
                          __float_as_uint(values[6]), __float_as_uint(values[7]));
    return raw;
  }
  uint32_t halves[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    halves[i] = type == InputType::kBFloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(values[i]))
                                             : __half_as_ushort(__float2half_rn(values[i]));
  return from_halves(halves);
}

__device__ bool is_stopped(const AdamNumbers& numbers) {
  return numbers.found_inf != nullptr && (*numbers.found_inf & 0x7FFFFFFFu) != 0;
}

// The parameter that a block works on.
__device__ int parameter_of(const Batch& batch) {
  int low = 0, high = batch.count;  // first_block[low] <= blockIdx.x < first_block[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.first_block[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ bool is_aligned_16(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}

// Calls run(at, count, is_vector) for the elements of a block's parameter that a thread works on.
template <typename Run>
__device__ void for_elements(const Batch& batch, int parameter, const Run& run) {
  const StepTensors& t = batch.tensors[parameter];
  const bool is_aligned = is_aligned_16(t.grad) && is_aligned_16(t.param) &&
                          is_aligned_16(t.first) && is_aligned_16(t.second) &&
                          is_aligned_16(t.extra);
  const int64_t start = int64_t{blockIdx.x - batch.first_block[parameter]} * kElementsPerBlock;
  const int64_t end = min(start + kElementsPerBlock, t.size);
  for (int64_t at = start + threadIdx.x * kEach; at < end; at += kThreads * kEach) {
    const int count = static_cast<int>(min(end - at, int64_t{kEach}));
    run(t, at, count, is_aligned && count == kEach);
  }
}

struct Adam {
  AdamDesc desc;
  AdamNumbers numbers;
  float beta1 = 0.0f, beta2 = 0.0f, rest1 = 0.0f, rest2 = 0.0f;  // rest: 1 - beta
  float of_first = 1.0f, of_second = 1.0f;  // by which the averages are divided
};

__global__ void __launch_bounds__(kThreads, 2)
    step_adam(const __grid_constant__ Batch batch, const __grid_constant__ Adam p) {
  __shared__ float divisors[2];
  const AdamDesc& desc = p.desc;
  const AdamNumbers& n = p.numbers;
  if (is_stopped(n)) return;
  if (threadIdx.x == 0) {
    divisors[0] = p.of_first;
    divisors[1] = p.of_second;
    if (n.corrects_bias && n.step_number_on_device != nullptr) {
      const double step = *n.step_number_on_device;
      divisors[0] = static_cast<float>(1.0 - pow(n.beta1, step));
      divisors[1] = static_cast<float>(1.0 - pow(n.beta2, step));
    }
  }
  __syncthreads();
  const float lr = n.lr_on_device != nullptr ? *n.lr_on_device : n.lr;
  const float scale = n.inv_scale_on_device != nullptr ? *n.inv_scale_on_device : n.inv_scale;
  const float of_first = divisors[0], of_second = divisors[1];
  const bool has_master = desc.master == MasterKind::kFloat32;
  const bool has_remainder = desc.master == MasterKind::kRemainder;
  const InputType extra_type = has_remainder ? InputType::kBFloat16 : InputType::kFloat32;
  for_elements(
      batch, parameter_of(batch), [&](const StepTensors& t, int64_t at, int count, bool is_vector) {
        const Raw raw_grad = load_raw(t.grad, desc.grad, at, count, is_vector);
        const Raw raw_first = load_raw(t.first, desc.state, at, count, is_vector);
        const Raw raw_second = load_raw(t.second, desc.state, at, count, is_vector);
        Raw raw_param{}, raw_extra{};
        if (!has_master) raw_param = load_raw(t.param, desc.param, at, count, is_vector);
        if (desc.master != MasterKind::kNone)
          raw_extra = load_raw(t.extra, extra_type, at, count, is_vector);
        float grads[kEach], firsts[kEach], seconds[kEach], values[kEach];
        to_floats(raw_grad, desc.grad, grads);
        to_floats(raw_first, desc.state, firsts);
        to_floats(raw_second, desc.state, seconds);
        if (has_master) {
          to_floats(raw_extra, InputType::kFloat32, values);
        } else {
          to_floats(raw_param, desc.param, values);
          if (has_remainder) {  // the lower bits are a signed number
#pragma unroll
            for (int i = 0; i < kEach; ++i)
              values[i] = __uint_as_float(__float_as_uint(values[i]) +
                                          static_cast<uint32_t>(static_cast<int32_t>(
                                              static_cast<int16_t>(half_of(raw_extra.low, i)))));
          }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          float g = __fmul_rn(grads[i], scale);
          if (!desc.is_decoupled) g = __fadd_rn(g, __fmul_rn(n.weight_decay, values[i]));
          const float m = __fadd_rn(__fmul_rn(p.beta1, firsts[i]), __fmul_rn(p.rest1, g));
          const float v =
              __fadd_rn(__fmul_rn(p.beta2, seconds[i]), __fmul_rn(__fmul_rn(p.rest2, g), g));
          const float root = __fsqrt_rn(__fdiv_rn(v, of_second));
          float update = __fdiv_rn(__fdiv_rn(m, of_first), __fadd_rn(root, n.eps));
          if (desc.is_decoupled) update = __fadd_rn(update, __fmul_rn(n.weight_decay, values[i]));
          firsts[i] = m;
          seconds[i] = v;
          values[i] = __fsub_rn(values[i], __fmul_rn(lr, update));
        }
        store_raw(from_floats(firsts, desc.state), t.first, desc.state, at, count, is_vector);
        store_raw(from_floats(seconds, desc.state), t.second, desc.state, at, count, is_vector);
        if (!has_remainder) {
          store_raw(from_floats(values, desc.param), t.param, desc.param, at, count, is_vector);
          if (has_master)
            store_raw(from_floats(values, InputType::kFloat32), t.extra, InputType::kFloat32, at,
                      count, is_vector);
          return;
        }
        uint32_t upper[kEach], lower[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const uint32_t bits = isnan(values[i]) ? 0x7FC00000u : __float_as_uint(values[i]);
          lower[i] = bits & 0xFFFFu;
          upper[i] = (bits + 0x8000u) >> 16;  // one more where the lower bits are negative
        }
        store_raw(from_halves(upper), t.param, InputType::kBFloat16, at, count, is_vector);
        store_raw(from_halves(lower), t.extra, InputType::kBFloat16, at, count, is_vector);
      });
}

// Calls launch(batch, blocks) for some parameters at a time.
template <typename Launch>
void in_batches(const std::vector<StepTensors>& tensors, const Launch& launch) {
  Batch batch;
  batch.count = 0;
  int64_t blocks = 0;
  const auto flush = [&] {
    if (batch.count == 0) return;
    batch.first_block[batch.count] = static_cast<unsigned>(blocks);
    launch(batch, static_cast<unsigned>(blocks));
    FP8CORE_CUDA(cudaGetLastError());
    batch.count = 0;
    blocks = 0;
  };
  for (const StepTensors& one : tensors) {
    if (one.size == 0) continue;
    const int64_t needed = (one.size + kElementsPerBlock - 1) / kElementsPerBlock;
    if (batch.count == kParametersPerStep || blocks + needed >= (int64_t{1} << 31)) flush();
    batch.tensors[batch.count] = one;
    batch.first_block[batch.count++] = static_cast<unsigned>(blocks);
    blocks += needed;
  }
  flush();
}

}  // namespace

void launch_adam(const AdamDesc& desc, const std::vector<StepTensors>& tensors,
                 const AdamNumbers& numbers, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  Adam p{desc, numbers};
  p.beta1 = static_cast<float>(numbers.beta1);
  p.beta2 = static_cast<float>(numbers.beta2);
  p.rest1 = static_cast<float>(1.0 - numbers.beta1);
  p.rest2 = static_cast<float>(1.0 - numbers.beta2);
  if (numbers.corrects_bias && numbers.step_number_on_device == nullptr) {
    p.of_first = static_cast<float>(1.0 - std::pow(numbers.beta1, numbers.step_number));
    p.of_second = static_cast<float>(1.0 - std::pow(numbers.beta2, numbers.step_number));
  }
  in_batches(tensors, [&](const Batch& batch, unsigned blocks) {
    step_adam<<<blocks, kThreads, 0, stream>>>(batch, p);
  });
}

}  // namespace fp8core
