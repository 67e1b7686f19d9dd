// Launches of attention of one query a sequence.
#include "single_query.h"

#include "../residency.h"
#include "single_query.cuh"

namespace fp8core {
namespace {

constexpr int kMostSplit = 8;   // blocks of a cluster on any device
constexpr int kLeastKeys = 64;  // that a block is for

using single_query::Storage;

// Calls `run` with the shape for heads of this size.
template <typename T, Storage kStorage, bool kIsMasked = false, typename Run>
void with_size(int size, const Run& run) {
  if (size == 64) return run(single_query::Shape<T, 64, kStorage, kIsMasked>{});
  if (size == 128) return run(single_query::Shape<T, 128, kStorage, kIsMasked>{});
  run(single_query::Shape<T, 256, kStorage, kIsMasked>{});
}

// Calls `run` with the shape for arguments like these.
template <typename T, typename Run>
void with_shape(int size, const SingleQueryArguments& arguments, const Run& run) {
  if (arguments.mask != nullptr) return with_size<T, Storage::kRows, true>(size, run);
  if (arguments.page_table == nullptr) return with_size<T, Storage::kRows>(size, run);
  if (arguments.k_scales.data == nullptr) return with_size<T, Storage::kPages>(size, run);
  with_size<T, Storage::kCodes>(size, run);
}

template <typename S>
void launch(single_query::Params p, int device, cudaStream_t stream) {
  constexpr auto kKernel = single_query::attend_once<S>;
  const DeviceGuard guard(device);
  p.chunks = (p.group_heads + single_query::kHeads - 1) / single_query::kHeads;
  const std::int64_t blocks = p.args.batch * (p.heads / p.group_heads) * p.chunks;
  FP8CORE_CHECK(blocks < (std::int64_t{1} << 31), "single_query_attention: ", p.args.batch,
                " sequences, more than a grid takes");
  // The lengths are on the device: by the capacity, and as long as no block waits for another's
  // end.
  int split = 1;
  const int most = has_clusters(device) ? kMostSplit : 1;
  const int at_once = resident_blocks<kKernel>(single_query::kWarps, S::kShared, device);
  while (split < most && 2 * split * blocks <= at_once && p.args.capacity >= 2 * split * kLeastKeys)
    split *= 2;
  const ClusterLaunch launch(dim3(static_cast<unsigned>(blocks), split), dim3(1, split),
                             single_query::kThreads, S::kShared, device, stream);
  FP8CORE_CUDA(cudaLaunchKernelEx(&launch.config, kKernel, p));
}

}  // namespace

void launch_single_query(const SingleQueryDesc& desc, const SingleQueryArguments& arguments,
                         cudaStream_t stream) {
  single_query::Params p{};
  p.args = arguments;
  p.heads = desc.heads, p.group_heads = desc.heads / desc.groups;
  p.scale = desc.scale * single_query::kLog2E;
  if (arguments.page_table != nullptr) {
    p.page_size = Divisor(static_cast<std::uint32_t>(arguments.page_size));
    p.columns = static_cast<int>(arguments.capacity / arguments.page_size);
  }
  p.left = desc.left, p.right = desc.right, p.is_at_the_end = desc.is_at_the_end;
  const auto run = [&](auto shape) { launch<decltype(shape)>(p, desc.device, stream); };
  if (desc.input == InputType::kBFloat16)
    with_shape<__nv_bfloat16>(desc.head_size, arguments, run);
  else
    with_shape<__half>(desc.head_size, arguments, run);
}

}  // namespace fp8core
