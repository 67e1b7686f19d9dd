// Rotary position embedding, and its transposed map: pairs of elements of a head are rotated by the
// angles of a token's position. Float32 arithmetic, rounded once.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

enum class RotaryLayout { kSbhd, kBshd, kThd };

struct RotaryDesc {
  RotaryLayout layout;
  bool is_interleaved;  // pairs are (0, 1), (2, 3), else (i, i + r / 2)
  bool is_inverse;      // the transposed map
  InputType input;      // of x and of y
  int device;
};

// x [outer, inner, heads, head_size], its strides in elements. The first two dimensions are those
// of the layout; in kThd, inner is 1 and outer the number of tokens.
struct HeadsView {
  const void* data = nullptr;
  std::int64_t outer = 0, inner = 0, heads = 0, head_size = 0;
  std::int64_t outer_stride = 0, inner_stride = 0, head_stride = 0, element_stride = 0;

  auto fields() {
    return std::tie(data, outer, inner, heads, head_size, outer_stride, inner_stride, head_stride,
                    element_stride);
  }
};

// y is contiguous, of the shape of x; with keys and values, of the tokens and the head size of x,
// it has the heads of x, keys and values one after the other, of which those of values are copied.
// A token of no sequence has zeros in the others; the rotated elements are NaN where freqs has no
// row for a position.
struct RotaryArguments {
  HeadsView x;
  const float* freqs = nullptr;  // [positions, rotated], contiguous: angles in radians
  std::int64_t positions = 0, rotated = 0;
  const std::int32_t* starts = nullptr;      // [sequences]; null: every sequence starts at 0
  const std::int32_t* cu_seqlens = nullptr;  // kThd: [sequences + 1]
  std::int64_t sequences = 0;                // kThd
  void* y = nullptr;

  HeadsView keys, values;  // optional; no heads: x alone

  static constexpr int kOptional = 18;
  auto fields() {
    return std::tie(x, freqs, positions, rotated, starts, cu_seqlens, sequences, y, keys, values);
  }
};

// One launch; an empty x launches nothing. The values of starts and cu_seqlens are not trusted:
// whatever they are, no address outside of the tensors follows from them.
void rotary(const RotaryDesc& desc, const RotaryArguments& arguments, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
