// One product a group, in one launch for up to 64 groups; where groups end is known on the device
// alone. Compute capability 9.0; of an a without a scale, which has 16 bits, any with 227 KiB of
// shared memory a block: one launch for up to 128 groups, stacked.
//
//     stacked:     d[m_g, n] = a[m_g, k] @ b_g[n, k].T     groups of a's and d's rows
//     contracted:  d_g[m, n] = a[m, k_g] @ b[n, k_g].T     groups of k, as quantize.h lays them
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "fp8core/gemm.h"

namespace fp8core FP8CORE_EXPORTED {

struct GroupedGemmDesc {
  ElementType a, b;
  ScaleMode a_scale, b_scale;
  ElementType out;
  bool contracts;
  bool accumulate;         // add to d, of float32
  bool fast_accumulation;  // no float32 sum every 128 elements of k; not with blocks along k
  int device;
};

// Codes [rows, k] with adjacent k, and scales [scale rows, scale blocks] of any strides.
struct GroupedOperand {
  std::vector<const void*> data;                          // one, or one a group
  std::int64_t pitch = 0;                                 // bytes between rows, a multiple of 16
  std::vector<const float*> scale_inv;                    // none of an operand in high precision
  std::int64_t scale_row_stride = 0, scale_k_stride = 0;  // floats
  std::int64_t scale_blocks = 0;                          // of scale_inv along k

  auto fields() {
    return std::tie(data, pitch, scale_inv, scale_row_stride, scale_k_stride, scale_blocks);
  }
};

struct GroupedGemmArguments {
  std::int64_t m = 0, n = 0, k = 0;  // those of all groups together; n a multiple of 16
  GroupedOperand a, b;
  std::vector<const void*> bias;  // [n], one a group, or none
  ElementType bias_type = ElementType::kFloat32;
  std::vector<void*> d;                   // [m, n] without gaps, one, or one a group
  const std::int64_t* offsets = nullptr;  // [groups + 1]
  std::int64_t groups = 0;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(m, n, k, a, b, bias, bias_type, d, offsets, groups); }
};

// Enqueues on `stream`; waits for nothing, so it can be captured. Rows of a stacked d beyond the
// last group become zeros, or stay where it accumulates.
void grouped_gemm(const GroupedGemmDesc& desc, const GroupedGemmArguments& arguments,
                  StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
