// Codes of 8 bits [rows, cols] to [cols, rows]: operands that came from other ranks in the other
// order than a product reads.
#pragma once

#include <cstdint>
#include <tuple>

#include "fp8core/device.h"

namespace fp8core FP8CORE_EXPORTED {

struct TransposeDesc {
  int device;
};

struct TransposeArguments {
  const std::uint8_t* codes = nullptr;  // [rows, cols], whole
  std::int64_t rows = 0, cols = 0;      // multiples of 16
  std::uint8_t* transposed = nullptr;   // [cols, rows], whole

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(codes, rows, cols, transposed); }
};

// Both addresses are multiples of 16. One launch; none if there are no codes.
void transpose(const TransposeDesc& desc, const TransposeArguments& arguments, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
