// Gradients of norms. With z = (x - mean) * rstd and g = grad * gamma:
//
//     grad_x = rstd * (g - z * mean(g * z) - mean(g)), the last term for LayerNorm alone
//     grad_weight = sum over the rows of grad * z, grad_bias = sum over the rows of grad
//
// Blocks stay, and work on one row after the other. Each keeps sums of its rows for the parameters'
// gradients, and writes them as one partial sum in the end; a second kernel adds the partial sums
// in their order, so that equal inputs give equal bits.
#pragma once

#include "row.cuh"

namespace fp8core {

struct NormBackwardParams {
  NormBackwardArguments args;
  Affine affine;  // without the bias
  InputType output;
  float inverse_count;
  bool vectors;  // all that is read and written per row comes in whole vectors
};

constexpr int kBackwardThreads = 512;  // at most

// Sums over rows of two vectors a thread stay in its registers, those of more in shared memory.
template <int kVectors>
constexpr bool sums_in_registers = kVectors <= 2;

template <bool kLayerNorm>
constexpr int num_parameters = kLayerNorm ? 2 : 1;

// The partial sums of a block: [parameters, blocks, n].
template <bool kLayerNorm>
__device__ float* partial_of(const NormBackwardParams& p, int parameter, int64_t block,
                             int64_t blocks) {
  return p.args.workspace + (parameter * blocks + block) * p.args.grad.cols;
}

// A team's sums over rows: of grad * z, and of grad.
template <int kVectors, bool kLayerNorm>
struct RowSums {
  static constexpr bool kInRegisters = sums_in_registers<kVectors>;
  static constexpr int kParameters = num_parameters<kLayerNorm>;
  float values[kInRegisters ? kParameters : 1][kInRegisters ? kVectors : 1][8];
  float4* shared;  // [parameters, vectors, 2, kBackwardThreads], unless they are in registers

  __device__ float4* at(int parameter, int i, int half) const {
    return shared + ((parameter * kVectors + i) * 2 + half) * kBackwardThreads + thread_of_block();
  }

  __device__ explicit RowSums(float4* shared) : shared(shared) {
#pragma unroll
    for (int k = 0; k < kParameters; ++k)
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (kInRegisters) {
#pragma unroll
          for (int j = 0; j < 8; ++j) values[k][i][j] = 0.0f;
        } else {
          *at(k, i, 0) = *at(k, i, 1) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
  }

  __device__ void read(float (&sums)[8], int parameter, int i) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] = values[parameter][i][j];
    } else {
      const float4 low = *at(parameter, i, 0), high = *at(parameter, i, 1);
      sums[0] = low.x, sums[1] = low.y, sums[2] = low.z, sums[3] = low.w;
      sums[4] = high.x, sums[5] = high.y, sums[6] = high.z, sums[7] = high.w;
    }
  }

  __device__ void write(const float (&sums)[8], int parameter, int i) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < 8; ++j) values[parameter][i][j] = sums[j];
    } else {
      *at(parameter, i, 0) = make_float4(sums[0], sums[1], sums[2], sums[3]);
      *at(parameter, i, 1) = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
  }

  __device__ void add(const float (&grad)[8], const float (&z)[8], int i) {
    float sums[8];
    read(sums, 0, i);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = __fmaf_rn(grad[j], z[j], sums[j]);
    write(sums, 0, i);
    if constexpr (kLayerNorm) {
      read(sums, 1, i);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(sums[j], grad[j]);
      write(sums, 1, i);
    }
  }
};

// Eight elements of a row: its gradient, z, and g.
template <typename T, bool kLayerNorm>
struct Gradients {
  float grad[8], z[8], g[8];

  // The shares of the eight in the sums over the row.
  __device__ float sum_of_gz() const {
    return dot_of_eight([&](int j) { return g[j]; }, [&](int j) { return z[j]; });
  }
  __device__ float sum_of_g() const {
    return sum_of_eight([&](int j) { return g[j]; });
  }

  Gradients() = default;
  __device__ Gradients(const Eight<T>& grads, const Eight<T>& x, const RowStatistics& row,
                       const float (&gamma)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      grad[j] = grads[j];
      z[j] = standardized<kLayerNorm>(x[j], row);
      g[j] = __fmul_rn(grad[j], gamma[j]);
    }
  }
};

// Rounds grad_x of eight elements and stores them; mean_gz and mean_g are means over the row.
template <typename T, bool kLayerNorm>
__device__ void store_grad_x(const Gradients<T, kLayerNorm>& of, const RowStatistics& row,
                             float mean_gz, float mean_g, const NormBackwardParams& p, int64_t at,
                             int column, int count) {
  float grad_x[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float value = __fmaf_rn(-of.z[j], mean_gz, of.g[j]);
    if constexpr (kLayerNorm) value = __fsub_rn(value, mean_g);
    grad_x[j] = __fmul_rn(value, row.rstd);
  }
  if (p.args.addend != nullptr) {
    float added[8];
    round_values(grad_x, p.output);
    read_values(added, p.args.addend, p.output, at * p.args.addend_stride + column, count,
                p.vectors);
#pragma unroll
    for (int j = 0; j < 8; ++j) grad_x[j] = __fadd_rn(grad_x[j], added[j]);
  }
  store_values(p.args.grad_x, p.output, at * p.args.grad.cols + column, grad_x, count, p.vectors);
}

template <bool kLayerNorm>
__device__ RowStatistics load_statistics(const NormBackwardParams& p, int64_t at) {
  RowStatistics row;
  if constexpr (kLayerNorm) row.mean = __ldg(p.args.mean + at);
  row.rstd = __ldg(p.args.rstd + at);
  return row;
}

// Adds the sums of a block's teams, team by team, and writes them as the block's partial sum.
// `shared` [teams * columns of a team] is used where there are several.
template <int kVectors, bool kLayerNorm>
__device__ void store_partial_sums(const RowSums<kVectors, kLayerNorm>& sums, const Team& team,
                                   const NormBackwardParams& p, float* shared) {
#pragma unroll
  for (int k = 0; k < num_parameters<kLayerNorm>; ++k) {
    float* partial = partial_of<kLayerNorm>(p, k, blockIdx.x, gridDim.x);
    float of_team[8];
    if (blockDim.y == 1) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        sums.read(of_team, k, i);
        if (team.has(i)) store_floats(partial + team.column(i), of_team);
      }
      continue;
    }
    const int width = team.warps * kVectors * kChunk;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sums.read(of_team, k, i);
      store_floats(shared + threadIdx.y * width + team.column(i), of_team);
    }
    __syncthreads();
    for (int column = thread_of_block(); column < team.cols; column += threads_of_block()) {
      float sum = shared[column];
      for (int other = 1; other < static_cast<int>(blockDim.y); ++other)
        sum = __fadd_rn(sum, shared[other * width + column]);
      partial[column] = sum;
    }
  }
}

template <typename T, int kVectors, bool kLayerNorm>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    norm_backward_rows(const __grid_constant__ NormBackwardParams p) {
  constexpr bool kAhead = sizeof(T) == 2;  // loads the next row while this one is worked on
  // Gradients of a row stay in registers from its means to grad_x, or are computed again.
  constexpr bool kKeepsGradients = sums_in_registers<kVectors> && sizeof(T) == 2;
  constexpr bool kKeepsGamma = sums_in_registers<kVectors> && sizeof(T) == 2;
  extern __shared__ float4 dynamic[];
  constexpr int kMeans = num_parameters<kLayerNorm>;  // of g * z, and of g
  __shared__ float shared[4 * kBackwardThreads / 32 * kVectors];
  const Matrix& m = p.args.grad;
  const Team team(m.cols);
  const int stride = team.warps * kVectors;
  float* buffers = shared + 2 * kMeans * stride * threadIdx.y;
  RowSums<kVectors, kLayerNorm> sums(dynamic);
  float kept_gamma[kKeepsGamma ? kVectors : 1][8];
  const auto read_gamma = [&](float (&gamma)[8], int i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) gamma[j] = 0.0f;
    if (team.has(i)) p.affine.read_gamma(gamma, team.column(i), 8, true);
  };
  if constexpr (kKeepsGamma) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) read_gamma(kept_gamma[i], i);
  }
  const auto gradients_of = [&](const Eight<T>& grad, const Eight<T>& x, const RowStatistics& row,
                                int i) {
    if constexpr (kKeepsGamma) return Gradients<T, kLayerNorm>(grad, x, row, kept_gamma[i]);
    float gamma[8];
    read_gamma(gamma, i);
    return Gradients<T, kLayerNorm>(grad, x, row, gamma);
  };
  const int64_t step = team.row_step();
  int64_t at = team.first_row();
  Eight<T> next_grad[kVectors], next_x[kVectors];
  RowStatistics next_row;
  const auto load = [&](int64_t row) {
    load_row(next_grad, m.data, row * m.stride, team);
    load_row(next_x, p.args.x, row * p.args.x_stride, team);
    next_row = load_statistics<kLayerNorm>(p, row);
  };
  if (kAhead && at < m.rows) load(at);
  int turn = 0;
  for (; at < m.rows; at += step, turn ^= 1) {
    if (!kAhead) load(at);
    Eight<T> grad[kVectors], x[kVectors];
    const RowStatistics row = next_row;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) grad[i] = next_grad[i], x[i] = next_x[i];
    if (kAhead && at + step < m.rows) load(at + step);
    float lane_sums[kMeans * kVectors], means[kMeans];
    Gradients<T, kLayerNorm> kept[kKeepsGradients ? kVectors : 1];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto of = gradients_of(grad[i], x[i], row, i);
      if constexpr (kKeepsGradients) kept[i] = of;
      sums.add(of.grad, of.z, i);
      lane_sums[i] = of.sum_of_gz();
      if constexpr (kLayerNorm) lane_sums[kVectors + i] = of.sum_of_g();
      if constexpr (!kKeepsGradients) {
        forget(grad[i]);
        forget(x[i]);
      }
    }
    row_sums<kMeans, kVectors>(means, lane_sums, buffers + turn * kMeans * stride, stride, team);
    const float mean_gz = __fmul_rn(means[0], p.inverse_count);
    const float mean_g = kLayerNorm ? __fmul_rn(means[kMeans - 1], p.inverse_count) : 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!team.has(i)) continue;
      if constexpr (kKeepsGradients) {
        store_grad_x(kept[i], row, mean_gz, mean_g, p, at, team.column(i), 8);
      } else {
        const auto of = gradients_of(grad[i], x[i], row, i);
        store_grad_x(of, row, mean_gz, mean_g, p, at, team.column(i), 8);
        forget(grad[i]);
      }
    }
  }
  store_partial_sums(sums, team, p, reinterpret_cast<float*>(dynamic));
}

// A row whose vectors may be cut off by its end, or are not aligned.
template <typename T, bool kLayerNorm>
__device__ Gradients<T, kLayerNorm> load_gradients(const NormBackwardParams& p,
                                                   const RowStatistics& row, int64_t at, int column,
                                                   int count) {
  const Matrix& m = p.args.grad;
  Eight<T> grad, x;
  float gamma[8];
  load_eight(grad, static_cast<const T*>(m.data) + at * m.stride + column, count, p.vectors);
  load_eight(x, static_cast<const T*>(p.args.x) + at * p.args.x_stride + column, count, p.vectors);
  p.affine.read_gamma(gamma, column, count, p.vectors);
  return Gradients<T, kLayerNorm>(grad, x, row, gamma);
}

// grad_x of rows of any length and alignment: a team reads each row once for the means and once for
// the result.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kBackwardThreads)
    norm_backward_long_rows(const __grid_constant__ NormBackwardParams p) {
  __shared__ float shared[4 * kBackwardThreads / 32];
  const Matrix& m = p.args.grad;
  const Team team(m.cols);
  const int stride = team.warps;
  float* buffers = shared + 4 * stride * threadIdx.y;
  const int first = (team.warp * 32 + team.lane) * 8, step = team.warps * kChunk;
  int turn = 0;
  for (int64_t at = team.first_row(); at < m.rows; at += team.row_step()) {
    const RowStatistics row = load_statistics<kLayerNorm>(p, at);
    const auto gradients_at = [&](int column) {
      const int count = team.cols - column;
      return load_gradients<T, kLayerNorm>(p, row, at, column, count);
    };
    RunningSums gz, g;
    for (int start = 0; start < team.cols; start += step, turn ^= 1) {
      const auto of = gradients_at(start + first);
      const float gz_sum = chunk_sum(of.sum_of_gz()), g_sum = chunk_sum(of.sum_of_g());
      float *gz_chunks = buffers + turn * stride, *g_chunks = buffers + (2 + turn) * stride;
      if (team.lane == 0) gz_chunks[team.warp] = gz_sum, g_chunks[team.warp] = g_sum;
      team.wait();
      gz.add(gz_chunks, team.warps);
      g.add(g_chunks, team.warps);
    }
    const float mean_gz = __fmul_rn(gz.total(), p.inverse_count);
    const float mean_g = __fmul_rn(g.total(), p.inverse_count);
    for (int column = first; column < team.cols; column += step)
      store_grad_x(gradients_at(column), row, mean_gz, mean_g, p, at, column, team.cols - column);
  }
}

// The partial sums that go with norm_backward_long_rows: a block takes one chunk of columns and,
// together with those below it in the grid, all rows. Its warps take turns at rows.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kBackwardThreads)
    norm_backward_columns(const __grid_constant__ NormBackwardParams p) {
  constexpr int kWarps = kBackwardThreads / 32;
  __shared__ alignas(16) float shared[kWarps][kChunk];
  const Matrix& m = p.args.grad;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int start = blockIdx.x * kChunk, column = start + lane * 8;
  const int cols = static_cast<int>(m.cols), count = cols - column;
  RowSums<1, kLayerNorm> sums(nullptr);
  for (int64_t at = static_cast<int64_t>(blockIdx.y) * kWarps + warp; at < m.rows;
       at += static_cast<int64_t>(gridDim.y) * kWarps) {
    const RowStatistics row = load_statistics<kLayerNorm>(p, at);
    const auto of = load_gradients<T, kLayerNorm>(p, row, at, column, count);
    sums.add(of.grad, of.z, 0);
  }
#pragma unroll
  for (int k = 0; k < num_parameters<kLayerNorm>; ++k) {
    float of_warp[8];
    sums.read(of_warp, k, 0);
    __syncthreads();
    store_floats(shared[warp] + lane * 8, of_warp);
    __syncthreads();
    float* partial = partial_of<kLayerNorm>(p, k, blockIdx.y, gridDim.y);
    for (int i = threadIdx.x; i < kChunk && start + i < cols; i += kBackwardThreads) {
      float sum = shared[0][i];
      for (int other = 1; other < kWarps; ++other) sum = __fadd_rn(sum, shared[other][i]);
      partial[start + i] = sum;
    }
  }
}

// Adds partial sums [parameters, count, n] in their order. Block (32, 16), grid (n / 32,
// parameters): a warp adds every sixteenth, then the sixteen sums are added.
constexpr int kFinishWarps = 16;

template <bool kLayerNorm>
__global__ void __launch_bounds__(32 * kFinishWarps)
    add_partial_sums(const float* partials, int count, int64_t cols, float* grad_weight,
                     float* grad_bias) {
  __shared__ float shared[kFinishWarps][32];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const float* from = partials + static_cast<int64_t>(blockIdx.y) * count * cols + column;
  float sum = 0.0f;
  if (column < cols) {
#pragma unroll 4
    for (int i = threadIdx.y; i < count; i += kFinishWarps) sum = __fadd_rn(sum, from[i * cols]);
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= cols) return;
  for (int i = 1; i < kFinishWarps; ++i) sum = __fadd_rn(sum, shared[i][threadIdx.x]);
  (kLayerNorm && blockIdx.y == 1 ? grad_bias : grad_weight)[column] = sum;
}

}  // namespace fp8core
