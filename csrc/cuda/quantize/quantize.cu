// Launches of the casts with float32 scales, and of amaxes.
#include <algorithm>

#include "../sums/column_sums.h"
#include "casts_from.h"
#include "tile.cuh"
#include "tile_params.h"
#include "vectors.h"

namespace fp8core {
namespace {

__global__ void __launch_bounds__(kAmaxThreads)
    finish_amax(const float* partials, int count, float* amax_out) {
  __shared__ float shared[kAmaxThreads / 32];
  const float largest = reduce_partials<kAmaxThreads>(partials, count, shared);
  if (threadIdx.x == 0) *amax_out = largest;
}

struct CarriedOffsets {
  int64_t values[kOffsetsAtOnce];
};

__global__ void __launch_bounds__(kOffsetsAtOnce)
    store_offsets(int64_t* to, const __grid_constant__ CarriedOffsets offsets, int count) {
  const int at = threadIdx.x;
  if (at < count) to[at] = offsets.values[at];
}

}  // namespace

void launch_group_offsets(const GroupOffsets& arguments, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  const std::vector<std::int64_t>& all = arguments.offsets;
  for (std::size_t first = 0; first < all.size(); first += kOffsetsAtOnce) {
    const std::size_t count = std::min<std::size_t>(kOffsetsAtOnce, all.size() - first);
    CarriedOffsets carried{};
    std::copy_n(all.begin() + first, count, carried.values);
    store_offsets<<<1, kOffsetsAtOnce, 0, stream>>>(arguments.to + first, carried,
                                                    static_cast<int>(count));
  }
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments,
                     cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  with_input(desc.input, [&](auto casts) {
    casts.quantize(desc, tile_params(desc, arguments), /*tile_sums=*/nullptr,
                   num_multiprocessors(desc.device), stream);
  });
}

void launch_quantize_and_sum(const QuantizeDesc& desc, const QuantizeAndSumArguments& arguments,
                             cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const QuantizeArguments& cast = arguments.cast;
  with_input(desc.input, [&](auto casts) {
    casts.quantize(desc, tile_params(desc, cast), arguments.tile_sums,
                   num_multiprocessors(desc.device), stream);
  });
  if (arguments.sums != nullptr)
    launch_add_parts(arguments.tile_sums, num_tile_rows(cast.x, {}), cast.x.cols, arguments.sums,
                     stream);
}

int launch_partial_amaxes(const AmaxDesc& desc, const AmaxArguments& arguments,
                          cudaStream_t stream) {
  if (arguments.x.rows == 0 || arguments.x.cols == 0) return 0;
  const DeviceGuard guard(desc.device);
  return with_input(desc.input, [&](auto casts) {
    return casts.partial_amaxes(arguments.x, arguments.workspace, num_multiprocessors(desc.device),
                                stream);
  });
}

void launch_amax(const AmaxDesc& desc, const AmaxArguments& arguments, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  if (desc.granularity == Granularity::kTensor && arguments.groups.offsets == nullptr) {
    const int count = launch_partial_amaxes(desc, arguments, stream);
    finish_amax<<<1, kAmaxThreads, 0, stream>>>(arguments.workspace, count, arguments.amax_out);
  } else {
    TileParams params;
    params.args.x = arguments.x;
    params.args.groups = arguments.groups;
    params.args.workspace = arguments.amax_out;
    params.part_columns = arguments.x.cols;
    params.tile_columns = static_cast<int>(num_tile_columns(arguments.x));
    params.vector_loads = reads_vectors(arguments.x, desc.input);
    with_input(desc.input, [&](auto casts) { casts.amaxes(desc.granularity, params, stream); });
  }
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
