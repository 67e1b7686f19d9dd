// From codes to values, at the speed of memory: a thread loads the codes of 16 bytes of values,
// from up to four positions at once, and stores each 16 bytes whole, so that a warp writes whole
// sectors.
#include "dequantize.h"

#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"
#include "decode.cuh"

namespace fp8core {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;  // that a thread holds at once

struct Params {
  DequantizeArguments args;
  int64_t units = 0, units_per_row = 0;
  int row_shift = 0, k_shift = 0;  // from an element's position to that of its scale
  ScaleFormat scale = ScaleFormat::kFloat32;
};

// kBytes of codes, as they lie in memory.
template <int kBytes>
struct Codes;

template <>
struct Codes<8> {
  uint2 words;
  __device__ void load(const uint8_t* from) {
    words = __ldcs(reinterpret_cast<const uint2*>(from));
  }
  __device__ uint32_t from_byte(int at) const {
    return (at < 4 ? words.x : words.y) >> 8 * (at % 4);
  }
};

template <typename Word>
struct OneWord {
  uint32_t word;
  __device__ void load(const uint8_t* from) { word = __ldcs(reinterpret_cast<const Word*>(from)); }
  __device__ uint32_t from_byte(int at) const { return word >> 8 * at; }
};

template <>
struct Codes<4> : OneWord<uint32_t> {};
template <>
struct Codes<2> : OneWord<unsigned short> {};
template <>
struct Codes<1> : OneWord<unsigned char> {};

// A scale as it lies in memory: its use waits for the load.
__device__ inline uint32_t load_scale(const Params& p, int64_t row, int64_t column) {
  const int64_t at =
      (row >> p.row_shift) * p.args.row_stride + (column >> p.k_shift) * p.args.block_stride;
  if (p.scale == ScaleFormat::kFloat32)
    return __float_as_uint(__ldg(static_cast<const float*>(p.args.scale_inv) + at));
  return __ldg(static_cast<const uint8_t*>(p.args.scale_inv) + at);
}

template <ElementType kFormat>
__device__ float scale_value(const Params& p, uint32_t loaded, float global_scale_inv) {
  if constexpr (kFormat == ElementType::kE2M1)
    return __fmul_rn(decode2<ElementType::kE4M3>(loaded).x, global_scale_inv);
  else
    return p.scale == ScaleFormat::kFloat32 ? __uint_as_float(loaded) : e8m0_value(loaded);
}

template <typename Out>
__device__ void store_one(Out* to, float value) {
  if constexpr (std::is_same_v<Out, float>)
    *to = value;
  else if constexpr (std::is_same_v<Out, __half>)
    *to = __float2half_rn(value);
  else
    *to = __float2bfloat16_rn(value);
}

template <typename Out, int kWidth>
__device__ void store(Out* to, const float (&v)[kWidth]) {
  if constexpr (kWidth * sizeof(Out) < 16) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) store_one(to + i, v[i]);
  } else if constexpr (std::is_same_v<Out, float>) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(rounded_pair(v[0], v[1], Out{}), rounded_pair(v[2], v[3], Out{}),
                   rounded_pair(v[4], v[5], Out{}), rounded_pair(v[6], v[7], Out{}));
  }
}

// Units of kWidth elements, row by row; k is a multiple of kWidth, so x is units one after another.
template <ElementType kFormat, typename Out, int kWidth>
__global__ void __launch_bounds__(kThreads) dequantize_units(const __grid_constant__ Params p) {
  constexpr int kPerByte = kFormat == ElementType::kE2M1 ? 2 : 1;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnits) + threadIdx.x;
  const float global = kFormat == ElementType::kE2M1 ? __ldg(p.args.global_scale_inv) : 1.0f;
  Codes<kWidth / kPerByte> codes[kUnits];
  uint32_t scales[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t at = first + i * kThreads;
    if (at >= p.units) break;
    const int64_t row = at / p.units_per_row;
    const int64_t column = (at - row * p.units_per_row) * kWidth;
    codes[i].load(p.args.codes + row * p.args.stride + column / kPerByte);
    scales[i] = load_scale(p, row, column);
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t at = first + i * kThreads;
    if (at >= p.units) break;
    const float scale = scale_value<kFormat>(p, scales[i], global);
    float values[kWidth];
    if constexpr (kWidth == 1) {
      values[0] = __fmul_rn(decode2<kFormat>(codes[i].from_byte(0)).x, scale);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j += 2) {
        const float2 pair = decode2<kFormat>(codes[i].from_byte(j / kPerByte));
        values[j] = __fmul_rn(pair.x, scale);
        values[j + 1] = __fmul_rn(pair.y, scale);
      }
    }
    store<Out, kWidth>(static_cast<Out*>(p.args.x) + at * kWidth, values);
  }
}

int shift_of(int64_t elements) {  // of 0, which stands for all: every position becomes 0
  int shift = 0;
  while (elements >> shift > 1) ++shift;
  return elements == 0 ? 62 : shift;
}

template <ElementType kFormat, typename Out, int kWidth>
void launch_units(Params p, cudaStream_t stream) {
  p.units_per_row = p.args.k / kWidth;
  p.units = p.args.rows * p.units_per_row;
  const int64_t blocks = (p.units + kThreads * kUnits - 1) / (kThreads * kUnits);
  FP8CORE_CHECK(blocks < (int64_t{1} << 31), "dequantize: ", p.args.rows, " x ", p.args.k,
                " elements, more than a grid takes");
  dequantize_units<kFormat, Out, kWidth><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  FP8CORE_CUDA(cudaGetLastError());
}

template <ElementType kFormat, typename Out>
void launch_to(const Params& p, cudaStream_t stream) {
  constexpr int kPerByte = kFormat == ElementType::kE2M1 ? 2 : 1;
  constexpr int kWidth = 16 / sizeof(Out);
  constexpr int kBytes = kWidth / kPerByte;
  const DequantizeArguments& args = p.args;
  const bool is_whole = args.k % kWidth == 0 && is_aligned(args.x, 16);
  if (is_whole && is_aligned(args.codes, kBytes) && (args.rows == 1 || args.stride % kBytes == 0))
    launch_units<kFormat, Out, kWidth>(p, stream);
  else
    launch_units<kFormat, Out, kPerByte>(p, stream);
}

template <ElementType kFormat>
void launch_format(ElementType out, const Params& p, cudaStream_t stream) {
  switch (out) {
    case ElementType::kBFloat16: return launch_to<kFormat, __nv_bfloat16>(p, stream);
    case ElementType::kFloat16: return launch_to<kFormat, __half>(p, stream);
    default: return launch_to<kFormat, float>(p, stream);
  }
}

}  // namespace

void launch_dequantize(const DequantizeDesc& desc, const DequantizeArguments& arguments,
                       cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  Params p;
  p.args = arguments;
  p.scale = desc.scale;
  p.row_shift = shift_of(desc.rows_per_scale);
  p.k_shift = shift_of(desc.k_per_scale);
  const bool has_one_scale = desc.rows_per_scale == 0 && desc.k_per_scale == 0;
  if (has_one_scale && arguments.stride == arguments.k) {  // rows of any k begin nowhere
    p.args.rows = 1;
    p.args.k = arguments.rows * arguments.k;
  }
  switch (desc.format) {
    case ElementType::kE2M1: return launch_format<ElementType::kE2M1>(desc.out, p, stream);
    case ElementType::kE5M2: return launch_format<ElementType::kE5M2>(desc.out, p, stream);
    default: return launch_format<ElementType::kE4M3>(desc.out, p, stream);
  }
}

}  // namespace fp8core
