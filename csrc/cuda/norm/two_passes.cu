// Norms with casts in two passes over x. backends/cuda/build.py compiles this file once for each
// type of input of 16 bits, side by side: FP8CORE_INPUT names its enumerator.
#include "../element.h"
#include "../quantize/launch.cuh"
#include "../residency.h"
#include "first_pass.cuh"
#include "fused_from.h"
#include "norm_source.cuh"
#include "teams.h"

#ifndef FP8CORE_INPUT
#error "compile with -DFP8CORE_INPUT=kBFloat16 or kFloat16"
#endif

namespace fp8core {
namespace {

// Returns how many partial amaxes of the tensor there are.
template <typename T, int kVectors, bool kLayerNorm, Granularity G>
int launch_rows(FirstPassParams p, int device, cudaStream_t stream) {
  constexpr auto kKernel = norm_first_pass<T, kVectors, kLayerNorm, G>;
  // Small blocks, unless each of them writes maxima of columns.
  const int threads = G == Granularity::kRow ? kFirstPassThreads : kFirstPassThreads / 2;
  const TeamShape shape(p.x.cols, kVectors, threads, kFirstPassThreads);
  const int resident =
      std::min(kMaxPartials, resident_blocks<kKernel>(shape.block_warps(), 0, device));
  const unsigned blocks = shape.grid(p.x.rows, resident);
  kKernel<<<blocks, shape.threads(), 0, stream>>>(p);
  FP8CORE_CUDA(cudaGetLastError());
  return static_cast<int>(blocks);
}

template <typename T, bool kLayerNorm, Granularity G>
int launch_first_pass(const FirstPassParams& p, int device, cudaStream_t stream) {
  constexpr int kWarps = kFirstPassThreads / 32;
  static_assert(kMostTwicePassed == 4 * kWarps * kChunk);
  const int chunks = num_chunks(p.x.cols);
  FP8CORE_CHECK(p.x.cols <= kMostTwicePassed, "quantize_norm: rows of ", p.x.cols,
                " elements; expected at most ", kMostTwicePassed);
  // With four vectors a lane there are fewer instructions, and with a bias or maxima of columns too
  // few registers.
  constexpr bool kIsLarge = kLayerNorm || G == Granularity::kRow;
  return chunks <= (kIsLarge ? 2 * kWarps : 2)
             ? launch_rows<T, 2, kLayerNorm, G>(p, device, stream)
             : launch_rows<T, 4, kLayerNorm, G>(p, device, stream);
}

template <typename T, bool kLayerNorm>
void launch_kind(const QuantizeNormDesc& desc, const FirstPassParams& p, TileParams tile,
                 cudaStream_t stream) {
  const int device = desc.norm.device;
  const Matrix& x = tile.args.x;
  switch (desc.cast.granularity) {
    case Granularity::kTensor:
      tile.args.num_partials =
          launch_first_pass<T, kLayerNorm, Granularity::kTensor>(p, device, stream);
      break;
    case Granularity::kRow: {
      const std::size_t bytes = num_amaxes(Granularity::kRow, x, {}) * sizeof(float);
      FP8CORE_CUDA(cudaMemsetAsync(p.amaxes, 0, bytes, stream));
      launch_first_pass<T, kLayerNorm, Granularity::kRow>(p, device, stream);
      break;
    }
    default: launch_first_pass<T, kLayerNorm, Granularity::kDelayed>(p, device, stream);
  }
  const auto tiles = static_cast<unsigned>(num_tiles(x, {}));
  const NormSourceInputs inputs = {p.affine, p.mean, p.rstd};
  if (desc.norm.output == InputType::kFloat32)
    launch_cast<NormSource<T, float, kLayerNorm>>(desc.cast, {tile, inputs, tiles}, stream);
  else
    launch_cast<NormSource<T, T, kLayerNorm>>(desc.cast, {tile, inputs, tiles}, stream);
}

}  // namespace

template <typename T>
void TwoPassesFrom<T>::launch(const QuantizeNormDesc& desc, FirstPassParams p, TileParams tile,
                              cudaStream_t stream) {
  if (desc.norm.kind == NormKind::kLayerNorm)
    launch_kind<T, true>(desc, p, tile, stream);
  else
    launch_kind<T, false>(desc, p, tile, stream);
}

template struct TwoPassesFrom<ElementOf<InputType::FP8CORE_INPUT>>;

}  // namespace fp8core
