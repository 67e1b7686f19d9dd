// Activations: the arguments are checked, then launched.
#include "fp8core/activation.h"

#include "../cuda/activation/activations.h"
#include "check_cast.h"

namespace fp8core {
namespace {

constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;

void check(const ActivationDesc& desc, const ActivationInputs& inputs) {
  const Matrix& x = inputs.x;
  check(x);
  FP8CORE_CHECK(!desc.is_gated || x.cols % 2 == 0, "activation: x has ", x.cols,
                " columns; a gated activation takes two halves");
  FP8CORE_CHECK(x.cols < kMostColumns, "activation: x has ", x.cols,
                " columns; expected less than ", kMostColumns);
  if (!desc.is_backward || is_empty(x)) return;
  const std::int64_t n = columns_of(desc, x);
  FP8CORE_CHECK(inputs.grad_stride >= n, "activation: ", inputs.grad_stride,
                " elements between the rows of grad; expected at least ", n);
  FP8CORE_CHECK_ADDRESS(inputs.grad, "grad [", x.rows, ", ", n, "]");
}

// Columns that a part of the result is a multiple of, where scales of blocks cover its rows.
std::int64_t columns_step(const QuantizeDesc& desc, const QuantizeArguments& arguments) {
  const bool has_blocks =
      desc.granularity == Granularity::kVec128 && arguments.rowwise.codes != nullptr;
  return has_blocks ? kTile : 1;
}

std::int64_t columns_step(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments) {
  return desc.is_square || arguments.rowwise.codes != nullptr ? kMxBlock : 1;
}

// Its kernel takes the result apart from its halves.
std::int64_t columns_step(const Nvfp4Desc&, const Nvfp4Arguments&) { return 1; }

template <typename CastDesc, typename CastArguments>
void check_cast(const CastActivationDesc<CastDesc>& desc,
                const CastActivationArguments<CastArguments>& arguments) {
  const ActivationDesc& function = desc.activation;
  const Matrix &x = arguments.inputs.x, &result = arguments.cast.x;
  const std::int64_t n = columns_of(function, x), cols = function.is_backward ? x.cols : n;
  const bool has_two_parts = function.is_gated && function.is_backward;
  check(function, arguments.inputs);
  check_results(desc.cast, arguments.cast);
  FP8CORE_CHECK(result.rows == x.rows && result.cols == cols, "quantize_activation: a result of ",
                result.rows, " x ", result.cols, "; expected ", x.rows, " x ", cols);
  FP8CORE_CHECK(function.input != InputType::kFloat32,
                "quantize_activation reads bfloat16 and float16, not float32");
  FP8CORE_CHECK(reads_vectors(function, arguments.inputs),
                "quantize_activation: rows of x and grad that do not begin at multiples of 16 "
                "bytes, or halves that are no multiple of 8 columns");
  const std::int64_t step = columns_step(desc.cast, arguments.cast);
  FP8CORE_CHECK(!has_two_parts || n % step == 0, "quantize_activation: halves of ", n,
                " columns; rows in blocks of ", step, " take a multiple of that");
  FP8CORE_CHECK(arguments.tile_sums == nullptr || function.is_backward,
                "quantize_activation: sums are those of a gradient");
  if (arguments.sums != nullptr)
    FP8CORE_CHECK_ADDRESS(arguments.tile_sums, "quantize_activation: tile_sums");
}

template <typename CastDesc, typename CastArguments>
void launch_checked(const CastActivationDesc<CastDesc>& desc,
                    const CastActivationArguments<CastArguments>& arguments, StreamHandle stream) {
  if (is_empty(arguments.inputs.x)) return;
  check_grid("quantize_activation", num_tiles(arguments.cast.x, {}));
  launch_quantize_activation(desc, arguments, as_stream(stream));
}

void check_quantize_activation(const QuantizeActivationDesc& desc,
                               const QuantizeActivationArguments& arguments) {
  const ActivationDesc& function = desc.activation;
  FP8CORE_CHECK(arguments.cast.groups.offsets == nullptr && arguments.cast.num_partials == 0,
                "quantize_activation takes neither groups nor amaxes");
  const bool has_two_parts = function.is_gated && function.is_backward;
  FP8CORE_CHECK(function.output == function.input ||
                    (function.output == InputType::kFloat32 && !has_two_parts),
                "quantize_activation rounds to the type of x or, but for the gradient of a gated "
                "activation, not at all");
  check_cast(desc, arguments);
}

}  // namespace

void activation(const ActivationDesc& desc, const ActivationArguments& arguments,
                StreamHandle stream) {
  check(desc, arguments.inputs);
  if (is_empty(arguments.inputs.x)) return;
  FP8CORE_CHECK_ADDRESS(arguments.out, "activation: the result");
  launch_activation(desc, arguments, as_stream(stream));
}

void quantize_activation(const QuantizeActivationDesc& desc,
                         const QuantizeActivationArguments& arguments, StreamHandle stream) {
  check_quantize_activation(desc, arguments);
  launch_checked(desc, arguments, stream);
}

void quantize_halves(const QuantizeActivationDesc& desc, const QuantizeHalvesArguments& arguments,
                     StreamHandle stream) {
  const Granularity granularity = desc.cast.granularity;
  const CastSlots& second = arguments.second;
  FP8CORE_CHECK(desc.activation.is_gated && desc.activation.is_backward,
                "quantize_halves: only the gradient of a gated activation has two halves");
  FP8CORE_CHECK(granularity == Granularity::kDelayed || granularity == Granularity::kTensor ||
                    granularity == Granularity::kVec128,
                "quantize_halves: no kernel casts halves by this granularity");
  FP8CORE_CHECK(granularity != Granularity::kDelayed || second.scale != nullptr,
                "quantize_halves: delayed scaling takes a scale of each half");
  FP8CORE_CHECK(granularity != Granularity::kTensor || second.workspace != nullptr,
                "quantize_halves: current scaling takes a workspace for each half");
  if (granularity != Granularity::kVec128)
    FP8CORE_CHECK_ADDRESS(second.scale_inv, "quantize_halves: the second scale_inv");
  check_quantize_activation(desc, arguments.both);
  if (is_empty(arguments.both.inputs.x)) return;
  check_grid("quantize_halves", num_tiles(arguments.both.cast.x, {}));
  launch_quantize_activation(desc, arguments.both, as_stream(stream), &second);
}

void quantize_activation_mxfp8(const QuantizeActivationMxfp8Desc& desc,
                               const QuantizeActivationMxfp8Arguments& arguments,
                               StreamHandle stream) {
  FP8CORE_CHECK(desc.activation.is_backward || desc.cast.format == Format::kE4M3,
                "quantize_activation: an activation is cast to e4m3 alone");
  FP8CORE_CHECK(desc.activation.output == desc.activation.input,
                "quantize_activation rounds to the type of x before blocks are cast");
  check_cast(desc, arguments);
  launch_checked(desc, arguments, stream);
}

void quantize_activation_nvfp4(const QuantizeActivationNvfp4Desc& desc,
                               const QuantizeActivationNvfp4Arguments& arguments,
                               StreamHandle stream) {
  FP8CORE_CHECK(desc.activation.output == desc.activation.input,
                "quantize_activation rounds to the type of x before blocks are cast");
  if (is_empty(arguments.inputs.x)) return;
  check_cast(desc, arguments);
  launch_checked(desc, arguments, stream);
}

}  // namespace fp8core
