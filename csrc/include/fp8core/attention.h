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

// Rows of heads, elements adjacent; strides in elements. But for scales, addresses and strides are
// multiples of 16 bytes.
struct HeadRows {
  const void* data = nullptr;
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;

  auto fields() { return std::tie(data, batch_stride, row_stride, head_stride); }
};

struct SingleQueryArguments {
  HeadRows q;     // a row a sequence
  HeadRows k, v;  // `capacity` rows a sequence, or pages, whose stride is that of the batch
  std::int64_t batch = 0, capacity = 0;
  // [batch + 1], of no query or of one, and of keys; both null: of one and of `capacity`.
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_kv = nullptr;
  void* out = nullptr;     // [rows, heads, head_size], whole
  float* stats = nullptr;  // [rows, heads]: the logarithms of the sums

  // Optional from here on: where the rows of q and out follow one another without gaps, the first
  // row of each sequence, [batch + 1], and their number. A sequence without a query writes nothing.
  const std::int32_t* starts = nullptr;
  std::int64_t rows = 0;

  // With pages, the page of each `page_size` keys of a sequence, [batch, capacity / page_size], of
  // `pages`: keys and values of another number are zeros.
  const std::int32_t* page_table = nullptr;
  std::int64_t page_size = 0, pages = 0;
  // With pages of e4m3 codes, floats: a scale for each row of a head, by which its codes are
  // multiplied, and rounded to the type of q. Elements of a head are one.
  HeadRows k_scales, v_scales;

  // Without lengths, pages and a window: a byte for each key of a sequence, 1 of one that its query
  // does not see, else 0. Sequences lie `mask_stride` bytes apart; 0 is one mask for all.
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_stride = 0;

  static constexpr int kOptional = 15;
  auto fields() {
    return std::tie(q, k, v, batch, capacity, cu_seqlens_q, cu_seqlens_kv, out, stats, starts, rows,
                    page_table, page_size, pages, k_scales, v_scales, mask, mask_stride);
  }
};

// One launch. A query that sees no key, and a sequence without one, has zeros in out and -inf in
// stats. The values of lengths, starts and pages are not trusted: no address outside of the tensors
// follows from them. The order of additions follows from the sizes and the length of a sequence.
void single_query_attention(const SingleQueryDesc& desc, const SingleQueryArguments& arguments,
                            StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
