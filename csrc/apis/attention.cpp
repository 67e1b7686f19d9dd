// Attention of one query a sequence: the arguments are checked, then launched.
#include "fp8core/attention.h"

#include "../cuda/attention/single_query.h"

namespace fp8core {
namespace {

constexpr std::int64_t kVector = 16;  // bytes that a thread reads at once

void check(const SingleQueryDesc& desc) {
  FP8CORE_CHECK(desc.input != InputType::kFloat32,
                "single_query_attention: expected bfloat16 or float16");
  FP8CORE_CHECK(desc.head_size == 64 || desc.head_size == 128 || desc.head_size == 256,
                "single_query_attention: heads of ", desc.head_size,
                " elements; expected 64, 128 or 256");
  FP8CORE_CHECK(desc.groups > 0 && desc.heads > 0 && desc.heads % desc.groups == 0,
                "single_query_attention: ", desc.heads, " heads in ", desc.groups, " groups");
  FP8CORE_CHECK(desc.left >= -1 && desc.right >= -1, "single_query_attention: window (", desc.left,
                ", ", desc.right, ")");
}

void check(const char* name, const HeadRows& rows, std::int64_t element_size) {
  FP8CORE_CHECK_ADDRESS(rows.data, "single_query_attention: ", name);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 &&
                          rows.batch_stride * element_size % kVector == 0 &&
                          rows.row_stride * element_size % kVector == 0 &&
                          rows.head_stride * element_size % kVector == 0;
  FP8CORE_CHECK(is_aligned, "single_query_attention: ", name, " at ", rows.data, " with strides ",
                rows.batch_stride, ", ", rows.row_stride, ", ", rows.head_stride,
                "; expected multiples of 16 bytes");
}

void check_pages(const SingleQueryArguments& arguments) {
  if (arguments.page_table == nullptr) {
    FP8CORE_CHECK(arguments.k_scales.data == nullptr,
                  "single_query_attention: codes without a page table");
    return;
  }
  FP8CORE_CHECK_ADDRESS(arguments.page_table, "single_query_attention: page_table");
  FP8CORE_CHECK(arguments.page_size > 0 && arguments.capacity % arguments.page_size == 0 &&
                    arguments.pages >= 0 && arguments.pages < (std::int64_t{1} << 31),
                "single_query_attention: ", arguments.pages, " pages of ", arguments.page_size,
                " keys, of which ", arguments.capacity, " are whole pages of a sequence");
  if (arguments.k_scales.data == nullptr) return;
  FP8CORE_CHECK_ADDRESS(arguments.k_scales.data, "single_query_attention: k_scales");
  FP8CORE_CHECK_ADDRESS(arguments.v_scales.data, "single_query_attention: v_scales");
}

void check_seen(const SingleQueryDesc& desc, const SingleQueryArguments& arguments) {
  const bool has_lengths = arguments.cu_seqlens_q != nullptr;
  FP8CORE_CHECK(has_lengths == (arguments.cu_seqlens_kv != nullptr),
                "single_query_attention: lengths of queries without those of keys, or the reverse");
  if (has_lengths) {
    FP8CORE_CHECK_ADDRESS(arguments.cu_seqlens_q, "single_query_attention: cu_seqlens_q");
    FP8CORE_CHECK_ADDRESS(arguments.cu_seqlens_kv, "single_query_attention: cu_seqlens_kv");
  } else {
    FP8CORE_CHECK(arguments.starts == nullptr && arguments.page_table == nullptr,
                  "single_query_attention: rows without gaps, or pages, without lengths");
  }
  if (arguments.mask == nullptr) return;
  FP8CORE_CHECK(!has_lengths && desc.left < 0 && desc.right < 0 && arguments.mask_stride >= 0,
                "single_query_attention: a mask with a stride of ", arguments.mask_stride,
                " bytes, window (", desc.left, ", ", desc.right, "); expected neither lengths nor",
                " a window beside it");
}

void check(const SingleQueryDesc& desc, const SingleQueryArguments& arguments) {
  FP8CORE_CHECK(arguments.batch > 0 && arguments.capacity >= 0 &&
                    arguments.capacity < (std::int64_t{1} << 30),
                "single_query_attention: ", arguments.batch, " sequences of up to ",
                arguments.capacity, " keys");
  check("q", arguments.q, 2);
  const bool has_codes = arguments.k_scales.data != nullptr;
  const std::int64_t stored = has_codes ? 1 : 2;
  if (arguments.capacity > 0) check("k", arguments.k, stored), check("v", arguments.v, stored);
  check_pages(arguments);
  check_seen(desc, arguments);
  FP8CORE_CHECK_ADDRESS(arguments.out, "single_query_attention: out");
  FP8CORE_CHECK_ADDRESS(arguments.stats, "single_query_attention: stats");
}

}  // namespace

void single_query_attention(const SingleQueryDesc& desc, const SingleQueryArguments& arguments,
                            StreamHandle stream) {
  check(desc);
  if (arguments.batch == 0) return;
  check(desc, arguments);
  launch_single_query(desc, arguments, as_stream(stream));
}

}  // namespace fp8core
