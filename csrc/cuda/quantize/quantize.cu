// The entries: check what is given, find out what may be read and written in vectors, launch.
#include "arguments.h"
#include "entry.h"
#include "fp8core/device.h"
#include "tile.cuh"

namespace fp8core {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  // of groups: they are counted in ints

__global__ void __launch_bounds__(kAmaxThreads)
    finish_amax(const float* partials, int count, float* amax_out) {
  __shared__ float shared[kAmaxThreads / 32];
  const float found = reduce_partials<kAmaxThreads>(partials, count, shared);
  if (threadIdx.x == 0) *amax_out = found;
}

// What the kernels take, after what is given was checked.
TileParams checked(const QuantizeDesc& desc, const QuantizeArguments& arguments) {
  const Matrix& x = arguments.x;
  check(x);
  FP8CORE_CHECK(arguments.rowwise.codes != nullptr || arguments.columnwise.codes != nullptr,
                "quantize: neither orientation is asked for");
  FP8CORE_CHECK(desc.granularity != Granularity::kDelayed || arguments.scale != nullptr,
                "quantize: delayed scaling takes a scale");
  const bool takes_workspace =
      desc.granularity == Granularity::kTensor || desc.granularity == Granularity::kRow;
  FP8CORE_CHECK(!takes_workspace || arguments.workspace != nullptr,
                "quantize: this granularity takes a workspace");
  const Groups& groups = arguments.groups;
  const std::int64_t pitch = arguments.column_pitch;
  const std::int64_t least =
      groups.offsets == nullptr ? x.rows : (x.rows / kGroupStep + groups.count) * kGroupStep;
  FP8CORE_CHECK(arguments.columnwise.codes == nullptr || pitch >= least, "quantize: ", pitch,
                " bytes between the rows of columnwise codes; expected at least ", least);
  FP8CORE_CHECK(groups.offsets == nullptr || (groups.count > 0 && x.rows < kMostRows),
                "quantize: ", x.rows, " rows in ", groups.count, " groups; expected at least one ",
                "group and less than ", kMostRows, " rows");
  for (const QuantizeOutput* out : {&arguments.rowwise, &arguments.columnwise})
    if (out->codes != nullptr && x.rows > 0 && x.cols > 0)
      FP8CORE_CHECK_ADDRESS(out->scale_inv, "quantize: a scale_inv");
  TileParams params;
  params.args = arguments;
  params.rule = desc.rule;
  params.tile_columns = static_cast<int>((x.cols + kTile - 1) / kTile);
  params.vector_loads = reads_vectors(x);
  params.vector_rows = x.cols % 8 == 0 && is_aligned(arguments.rowwise.codes, 8);
  params.vector_columns = pitch % 16 == 0 && is_aligned(arguments.columnwise.codes, 16);
  return params;
}

}  // namespace

void quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments, int device,
              cudaStream_t stream) {
  const Matrix& x = arguments.x;
  const TileParams params = checked(desc, arguments);
  if (x.cols == 0 || (x.rows == 0 && arguments.groups.offsets == nullptr)) return;
  const DeviceGuard guard(device);
  const int multiprocessors = num_multiprocessors(device);
  switch (x.type) {
    case InputType::kFloat32: return launch_from_float32(desc, params, multiprocessors, stream);
    case InputType::kBFloat16: return launch_from_bfloat16(desc, params, multiprocessors, stream);
    case InputType::kFloat16: return launch_from_float16(desc, params, multiprocessors, stream);
  }
}

void quantize_pair(const QuantizeDesc& desc, const QuantizeArguments& arguments,
                   const QuantizeDesc& other_desc, const QuantizeArguments& other, int device,
                   cudaStream_t stream) {
  const Matrix &x = arguments.x, &y = other.x;
  const bool is_whole =
      desc.granularity == Granularity::kDelayed || desc.granularity == Granularity::kTensor;
  FP8CORE_CHECK(is_whole && desc.granularity == other_desc.granularity &&
                    desc.format == Format::kE4M3 && other_desc.format == Format::kE4M3 &&
                    x.type == y.type && arguments.groups.offsets == nullptr &&
                    other.groups.offsets == nullptr,
                "quantize_pair takes two tensors of one type in e4m3, tensorwise, without groups");
  FP8CORE_CHECK(x.rows > 0 && x.cols > 0 && y.rows > 0 && y.cols > 0, "quantize_pair: ", x.rows,
                " x ", x.cols, " and ", y.rows, " x ", y.cols,
                "; expected at least one element each");
  const TileParams p = checked(desc, arguments), q = checked(other_desc, other);
  const DeviceGuard guard(device);
  const int multiprocessors = num_multiprocessors(device);
  switch (x.type) {
    case InputType::kFloat32: return launch_pair_from_float32(desc, p, q, multiprocessors, stream);
    case InputType::kBFloat16:
      return launch_pair_from_bfloat16(desc, p, q, multiprocessors, stream);
    case InputType::kFloat16: return launch_pair_from_float16(desc, p, q, multiprocessors, stream);
  }
}

int launch_partials_of(const Matrix& x, float* partials, int num_multiprocessors,
                       cudaStream_t stream) {
  const bool vectors = reads_vectors(x);
  switch (x.type) {
    case InputType::kFloat32:
      return partials_from_float32(x, vectors, partials, num_multiprocessors, stream);
    case InputType::kBFloat16:
      return partials_from_bfloat16(x, vectors, partials, num_multiprocessors, stream);
    case InputType::kFloat16:
      return partials_from_float16(x, vectors, partials, num_multiprocessors, stream);
  }
  return 0;
}

int partial_amaxes(const Matrix& x, float* workspace, int device, cudaStream_t stream) {
  check(x);
  if (x.rows == 0 || x.cols == 0) return 0;
  FP8CORE_CHECK_ADDRESS(workspace, "amax: the workspace");
  const DeviceGuard guard(device);
  return launch_partials_of(x, workspace, num_multiprocessors(device), stream);
}

void amax(const Matrix& x, float* amax_out, float* workspace, int device, cudaStream_t stream) {
  FP8CORE_CHECK_ADDRESS(amax_out, "amax: the result");
  const int count = partial_amaxes(x, workspace, device, stream);
  const DeviceGuard guard(device);
  finish_amax<<<1, kAmaxThreads, 0, stream>>>(workspace, count, amax_out);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
