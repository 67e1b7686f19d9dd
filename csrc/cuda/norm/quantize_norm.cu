// The launch of a norm with a cast: in one pass over x where the cast's scale is given, and panels
// are planned for such rows; else in two.
#include "../element.h"
#include "first_pass.cuh"
#include "fused_from.h"
#include "norms.h"
#include "panel.cuh"

namespace fp8core {
namespace {

template <typename T>
void launch_from(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                 const TileParams& tile, cudaStream_t stream) {
  const Matrix& x = arguments.cast.x;
  const Affine affine = {arguments.weight, arguments.bias, desc.norm.zero_centered};
  const Granularity granularity = desc.cast.granularity;
  const bool is_one_pass =
      granularity == Granularity::kDelayed || granularity == Granularity::kVec128;
  if (is_one_pass && desc.cast.format == Format::kE4M3) {
    PanelParams p{};
    p.tile = tile;
    p.affine = affine;
    p.mean = arguments.mean;
    p.rstd = arguments.rstd;
    p.inverse_count = inverse_of(x.cols);
    p.eps = desc.norm.eps;
    p.rounds = desc.norm.output == desc.norm.input;
    if (PanelsFrom<T>::launch(desc, p, stream)) return;
  }
  FirstPassParams p{};
  p.x = x;
  p.affine = affine;
  p.mean = arguments.mean;
  p.rstd = arguments.rstd;
  p.inverse_count = inverse_of(x.cols);
  p.eps = desc.norm.eps;
  p.amaxes = arguments.cast.workspace;
  TwoPassesFrom<T>::launch(desc, p, tile, stream);
}

}  // namespace

void launch_quantize_norm(const QuantizeNormDesc& desc, const QuantizeNormArguments& arguments,
                          cudaStream_t stream) {
  const DeviceGuard guard(desc.norm.device);
  const TileParams tile = tile_params(desc.cast, arguments.cast);
  with_type(desc.norm.input, [&](auto input) {
    if constexpr (input() != InputType::kFloat32)
      launch_from<ElementOf<input()>>(desc, arguments, tile, stream);
  });
}

}  // namespace fp8core
