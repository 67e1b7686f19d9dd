// From a descriptor and a size to a kernel, for one input type.
#pragma once

#include <algorithm>

#include "../residency.h"
#include "backward.cuh"
#include "forward.cuh"
#include "norms_from.h"
#include "teams.h"

namespace fp8core {

constexpr int kNormBlock = 256;  // threads of a block with several teams

template <typename T, int kVectors, bool kLayerNorm, bool kAdd>
void launch_rows(const NormParams& p, cudaStream_t stream) {
  const TeamShape shape(p.args.x.cols, kVectors, kNormBlock);
  const int64_t blocks = ceil_div(p.args.x.rows, shape.teams);
  norm_rows<T, kVectors, kLayerNorm, kAdd>
      <<<static_cast<unsigned>(blocks), shape.threads(), 0, stream>>>(p);
}

template <typename T, bool kLayerNorm, bool kAdd>
void launch_long(NormParams p, int device, cudaStream_t stream) {
  constexpr auto kKernel = norm_long_rows<T, kLayerNorm, kAdd>;
  const TeamShape shape(p.args.x.cols, kLongVectors, kNormBlock, kNormThreads);
  const int resident = resident_blocks<kKernel>(shape.block_warps(), 0, device);
  kKernel<<<shape.grid(p.args.x.rows, resident), shape.threads(), 0, stream>>>(p);
}

template <typename T, bool kLayerNorm, bool kAdd>
void launch_norm_of(const NormParams& p, int device, cudaStream_t stream) {
  const int chunks = num_chunks(p.args.x.cols);
  constexpr int kFew = sizeof(T) == 2 ? 2 : kNormChunks / 2;  // of float32 no more are held
  if (p.vectors && chunks <= kFew) return launch_rows<T, 2, kLayerNorm, kAdd>(p, stream);
  if constexpr (sizeof(T) == 2) {
    if (p.vectors && chunks <= kNormChunks) return launch_rows<T, 4, kLayerNorm, kAdd>(p, stream);
  }
  launch_long<T, kLayerNorm, kAdd>(p, device, stream);
}

template <typename T>
void NormsFrom<T>::norm(NormKind kind, NormParams p, int device, cudaStream_t stream) {
  const bool adds = p.args.residual != nullptr;
  if (kind == NormKind::kLayerNorm)
    (adds ? launch_norm_of<T, true, true> : launch_norm_of<T, true, false>)(p, device, stream);
  else
    (adds ? launch_norm_of<T, false, true> : launch_norm_of<T, false, false>)(p, device, stream);
  FP8CORE_CUDA(cudaGetLastError());
}

// The kernel that holds rows in `kVectors` vectors a lane, and its blocks.
template <typename T, int kVectors, bool kLayerNorm>
struct HeldBackward {
  static constexpr auto kKernel = norm_backward_rows<T, kVectors, kLayerNorm>;
  TeamShape shape;
  std::size_t shared;
  unsigned blocks;

  HeldBackward(int64_t rows, int64_t cols, int device) : shape(cols, kVectors, kBackwardThreads) {
    // Sums over rows: of all parameters in shared memory, or of one parameter at a time.
    const int at_once = sums_in_registers<kVectors> ? 1 : num_parameters<kLayerNorm>;
    shared = sizeof(float) * 8 * kVectors * at_once * kBackwardThreads;
    blocks = shape.grid(rows, resident_blocks<kKernel>(shape.block_warps(), shared, device));
  }
  int num_partials() const { return static_cast<int>(blocks); }
  void launch(NormBackwardParams p, cudaStream_t stream) const {
    kKernel<<<blocks, shape.threads(), shared, stream>>>(p);
  }
};

// The kernels that read rows again.
template <typename T, bool kLayerNorm>
struct LongBackward {
  static constexpr auto kKernel = norm_backward_long_rows<T, kLayerNorm>;
  TeamShape shape;
  unsigned blocks;
  dim3 columns;  // the grid of norm_backward_columns

  LongBackward(int64_t rows, int64_t cols, int device)
      : shape(cols, 1, kBackwardThreads / 2, kBackwardThreads),
        blocks(shape.grid(rows, resident_blocks<kKernel>(shape.block_warps(), 0, device))),
        columns(num_chunks(cols)) {
    const int64_t wanted = ceil_div(4 * num_multiprocessors(device), columns.x);
    columns.y = static_cast<unsigned>(std::min(wanted, ceil_div(rows, kBackwardThreads / 32)));
  }
  int num_partials() const { return static_cast<int>(columns.y); }
  void launch(NormBackwardParams p, cudaStream_t stream) const {
    kKernel<<<blocks, shape.threads(), 0, stream>>>(p);
    norm_backward_columns<T, kLayerNorm><<<columns, kBackwardThreads, 0, stream>>>(p);
  }
};

// Returns run(the kernels for rows of so many columns).
template <typename T, bool kLayerNorm, typename Run>
int with_backward(int64_t rows, int64_t cols, bool vectors, int device, const Run& run) {
  constexpr int kWarps = kBackwardThreads / 32;
  const int chunks = num_chunks(cols);
  if (vectors && chunks <= 2 * kWarps)
    return run(HeldBackward<T, 2, kLayerNorm>(rows, cols, device));
  if (vectors && chunks <= 4 * kWarps)
    return run(HeldBackward<T, 4, kLayerNorm>(rows, cols, device));
  return run(LongBackward<T, kLayerNorm>(rows, cols, device));
}

template <typename T>
int NormsFrom<T>::backward_partials(NormKind kind, int64_t rows, int64_t cols, int device) {
  // As many as either kernel needs, since an address may be aligned in one call and not in another.
  const auto most = [&](auto is_layernorm) {
    const auto count = [](const auto& kernels) { return kernels.num_partials(); };
    constexpr bool kLayerNorm = decltype(is_layernorm)::value;
    return std::max(with_backward<T, kLayerNorm>(rows, cols, true, device, count),
                    with_backward<T, kLayerNorm>(rows, cols, false, device, count));
  };
  return kind == NormKind::kLayerNorm ? most(std::true_type{}) : most(std::false_type{});
}

template <typename T, bool kLayerNorm>
void launch_backward_of(const NormBackwardParams& p, int device, cudaStream_t stream) {
  const Matrix& m = p.args.grad;
  const int count =
      with_backward<T, kLayerNorm>(m.rows, m.cols, p.vectors, device, [&](const auto& kernels) {
        kernels.launch(p, stream);
        return kernels.num_partials();
      });
  FP8CORE_CUDA(cudaGetLastError());
  const dim3 grid(static_cast<unsigned>(ceil_div(m.cols, 32)), num_parameters<kLayerNorm>);
  add_partial_sums<kLayerNorm><<<grid, dim3(32, kFinishWarps), 0, stream>>>(
      p.args.workspace, count, m.cols, p.args.grad_weight, p.args.grad_bias);
  FP8CORE_CUDA(cudaGetLastError());
}

template <typename T>
void NormsFrom<T>::backward(NormKind kind, NormBackwardParams p, int device, cudaStream_t stream) {
  if (kind == NormKind::kLayerNorm)
    launch_backward_of<T, true>(p, device, stream);
  else
    launch_backward_of<T, false>(p, device, stream);
}

}  // namespace fp8core
