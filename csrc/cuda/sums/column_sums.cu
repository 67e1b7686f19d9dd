// Column sums without atomics: a block of threads adds a part of the rows of 256 columns, a second
// kernel adds the parts, each in a fixed order.
#include "column_sums.h"

#include "../element.h"
#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"

namespace fp8core {
namespace {

constexpr int kThreads = 32 * kSumRowLanes;

struct Params {
  Matrix x;
  int rows_per_part = 0;
  float* sums = nullptr;  // [parts, cols]
};

// Eight columns of a row, read by a thread of a warp that reads 256. As vectors they are adjacent,
// else 32 apart, so that the warp's reads are adjacent.
template <typename T, bool kVectors>
struct Columns : Eight<T> {
  static constexpr int kLoads = 128 / sizeof(Eight<T>);  // at once: 128 bytes a thread
  static __device__ int position(int lane, int i) { return lane * 8 + i; }
  __device__ void load(const T* row, int lane, int left) {
    if (lane * 8 < left)  // of whole vectors
      this->load_kept(row + lane * 8);
    else
      clear();
  }
  __device__ void clear() { this->gather(nullptr, 0); }
};

template <typename T>
struct Columns<T, false> {
  static constexpr int kLoads = 4;
  float values[8];
  static __device__ int position(int lane, int i) { return lane + i * 32; }
  __device__ float operator[](int i) const { return values[i]; }
  __device__ void load(const T* row, int lane, int left) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      values[i] = position(lane, i) < left ? static_cast<float>(row[position(lane, i)]) : 0.0f;
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = 0.0f;
  }
};

// Thread (warp, lane) adds rows warp, warp + 8, ... of the part, of eight columns, one row after
// the other; then the eight warps are added. So the order is the same for both ways to read.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kVectors ? 4 : 3)
    sum_parts(const __grid_constant__ Params p) {
  using Piece = Columns<T, kVectors>;
  __shared__ alignas(16) float shared[kSumRowLanes][kSumColumns];
  const Matrix& m = p.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kSumColumns;
  const int left = static_cast<int>(min(m.cols - first_column, int64_t{kSumColumns}));
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * p.rows_per_part;
  const int rows = static_cast<int>(min(m.rows - first_row, int64_t{p.rows_per_part}));
  const int64_t step = kSumRowLanes * m.stride;
  const T* from = static_cast<const T*>(m.data) + (first_row + warp) * m.stride + first_column;
  float totals[8] = {};
  for (int row = warp; row < rows; row += Piece::kLoads * kSumRowLanes) {
    Piece x[Piece::kLoads];
#pragma unroll
    for (int i = 0; i < Piece::kLoads; ++i) {
      if (row + i * kSumRowLanes < rows)
        x[i].load(from, lane, left);
      else
        x[i].clear();
      from += step;
    }
#pragma unroll
    for (int i = 0; i < Piece::kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) totals[j] += x[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) shared[warp][Piece::position(lane, i)] = totals[i];
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= left) return;
  float total = shared[0][threadIdx.x];
#pragma unroll
  for (int i = 1; i < kSumRowLanes; ++i) total += shared[i][threadIdx.x];
  p.sums[blockIdx.y * m.cols + first_column + threadIdx.x] = total;
}

constexpr int kPartLanes = 32;

// The sum over the parts of 32 columns: lane l of a column adds parts l, l + 32, ..., then the
// lanes are added pairwise.
__global__ void __launch_bounds__(32 * kPartLanes)
    add_parts(const float* __restrict__ parts, int count, int64_t cols, float* __restrict__ sums) {
  __shared__ float shared[kPartLanes][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * 32;
  float total = 0.0f;
  if (first_column + lane < cols) {
    const float* from = parts + first_column + lane;
#pragma unroll 4
    for (int part = warp; part < count; part += kPartLanes) total += from[part * cols];
  }
  shared[warp][lane] = total;
  __syncthreads();
  total = shared[lane][warp];
#pragma unroll
  for (int other = 16; other > 0; other /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, other);
  if (lane == 0 && first_column + warp < cols) sums[first_column + warp] = total;
}

template <typename T>
void launch(const Params& p, dim3 grid, bool reads_vectors, cudaStream_t stream) {
  if (reads_vectors)
    sum_parts<T, /*kVectors=*/true><<<grid, kThreads, 0, stream>>>(p);
  else
    sum_parts<T, /*kVectors=*/false><<<grid, kThreads, 0, stream>>>(p);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace

void launch_column_sums(const ColumnSumsDesc& desc, const ColumnSumsArguments& arguments,
                        cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const Matrix& x = arguments.x;
  const int64_t parts = num_row_parts(x.rows, x.cols);
  const int64_t tiles = (x.cols + kSumColumns - 1) / kSumColumns;
  FP8CORE_CHECK(tiles < (int64_t{1} << 28), "column_sums: ", x.cols,
                " columns, more than a grid takes");
  Params p;
  p.x = x;
  p.rows_per_part = static_cast<int>((x.rows + parts - 1) / parts);
  p.sums = parts == 1 ? arguments.sums : arguments.workspace;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  with_type(desc.input, [&](auto type) {
    launch<ElementOf<type()>>(p, grid, reads_vectors(x, desc.input), stream);
  });
  if (parts == 1) return;
  const auto blocks = static_cast<unsigned>((x.cols + 31) / 32);
  add_parts<<<blocks, 32 * kPartLanes, 0, stream>>>(arguments.workspace, static_cast<int>(parts),
                                                    x.cols, arguments.sums);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
