// Attention of one query a sequence over the keys and values of a cache: bound by their bytes.
#pragma once

#include "fp8core/quantize.h"

namespace fp8core FP8CORE_EXPORTED {

// Heads h * (heads / groups) to (h + 1) * (heads / groups) - 1 share the keys and values of group
// h. The query of a sequence of `length` keys is at position `length` - 1 if `is_at_the_end`, else
// at 0, and sees the keys from position - left to position + right; -1 is no limit.
struct SingleQueryDesc {
  InputType input;  // of q, k, v and out: bfloat16 or float16
  int heads, groups;
  int head_size;  // 64, 128 or 256
  float scale;    // of the logits
  int left, right;
  bool is_at_the_end;
  int device;
};

// Rows of heads, elements adjacent; strides in elements, multiples of 8, as is the address of 16
// bytes.
struct HeadRows {
  const void* data = nullptr;
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;

  auto fields() { return std::tie(data, batch_stride, row_stride, head_stride); }
};

struct SingleQueryArguments {
  HeadRows q;     // a row a sequence
  HeadRows k, v;  // `capacity` rows a sequence
  std::int64_t batch = 0, capacity = 0;
  const std::int32_t* cu_seqlens_q = nullptr;   // [batch + 1]: of no query or of one
  const std::int32_t* cu_seqlens_kv = nullptr;  // [batch + 1]
  void* out = nullptr;                          // [rows, heads, head_size], whole
  float* stats = nullptr;                       // [rows, heads]: the logarithms of the sums

  // Optional from here on: where the rows of q and out follow one another without gaps, the first
  // row of each sequence, [batch + 1], and their number. A sequence without a query writes nothing.
  const std::int32_t* starts = nullptr;
  std::int64_t rows = 0;

  static constexpr int kOptional = 2;
  auto fields() {
    return std::tie(q, k, v, batch, capacity, cu_seqlens_q, cu_seqlens_kv, out, stats, starts,
                    rows);
  }
};

// One launch. A query that sees no key, and a sequence without one, has zeros in out and -inf in
// stats. The values of lengths and starts are not trusted: no address outside of the tensors
// follows from them. The order of additions follows from the sizes and the length of a sequence.
void single_query_attention(const SingleQueryDesc& desc, const SingleQueryArguments& arguments,
                            StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
