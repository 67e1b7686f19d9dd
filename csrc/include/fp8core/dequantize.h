// From codes to values: x [rows, k] = decode(codes) * scale. docs/numerics.md defines every bit.
#pragma once

#include <cstdint>
#include <tuple>

#include "fp8core/gemm.h"

namespace fp8core FP8CORE_EXPORTED {

// kE8M0 is a power of two in a byte. kE4M3 is a byte under a second scale, of the whole tensor.
enum class ScaleFormat { kFloat32, kE8M0, kE4M3 };

struct DequantizeDesc {
  ElementType format;  // of the codes; e2m1 two a byte, the first in its low half
  ElementType out;     // of x
  ScaleFormat scale;   // kE4M3 goes with e2m1, the others with codes of 8 bits
  int rows_per_scale;  // a power of two, or 0 for all rows
  int k_per_scale;     // likewise along k, from 16 on
  int device;
};

struct DequantizeArguments {
  const std::uint8_t* codes = nullptr;  // a row's are adjacent
  std::int64_t rows = 0, k = 0;         // elements
  std::int64_t stride = 0;              // bytes between the rows of codes
  const void* scale_inv = nullptr;      // [ceil(rows / rows_per_scale), ceil(k / k_per_scale)]
  std::int64_t row_stride = 0, block_stride = 0;  // entries between the scales of two blocks
  const float* global_scale_inv = nullptr;        // kE4M3, else null
  void* x = nullptr;                              // [rows, k], whole

  static constexpr int kOptional = 0;
  auto fields() {
    return std::tie(codes, rows, k, stride, scale_inv, row_stride, block_stride, global_scale_inv,
                    x);
  }
};

// Element times scale, rounded to float32, then to the type of x, where it may overflow to
// infinity. One launch; none if there are no elements.
void dequantize(const DequantizeDesc& desc, const DequantizeArguments& arguments,
                StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
