// Column sums without atomics: a block of threads adds 128 rows of 256 columns, a second kernel
// adds the rows of tiles, each in a fixed order.
#include "column_sums.h"

#include "../element.h"
#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"

namespace fp8core {
namespace {

constexpr int kColumns = 256;  // of a tile; kTile rows
constexpr int kWarps = 8;      // each adds 16 rows of a tile
constexpr int kThreads = 32 * kWarps;

struct Params {
  Matrix x;
  unsigned column_tiles = 0;
  int tiles_per_block = 1;  // one below the other
  float* sums = nullptr;    // [rows of blocks, cols]
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

// The sums of a thread's eight columns over 16 rows, of which the first `rows` are in the tensor:
// eight rows one after the other, and the next eight; added to `pairs`, which are zero.
template <typename Piece, typename T>
__device__ void add_rows(const T* from, int64_t stride, int rows, int lane, int left,
                         float (&pairs)[8]) {
#pragma unroll 1  // or there are too few registers
  for (int half = 0; half < 2; ++half) {
    float sums[8] = {};
#pragma unroll
    for (int first = 0; first < 8; first += Piece::kLoads) {
      Piece x[Piece::kLoads];
#pragma unroll
      for (int i = 0; i < Piece::kLoads; ++i) {
        if (half * 8 + first + i < rows)
          x[i].load(from, lane, left);
        else
          x[i].clear();
        from += stride;
      }
#pragma unroll
      for (int i = 0; i < Piece::kLoads; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(sums[j], x[i][j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) pairs[j] = __fadd_rn(pairs[j], sums[j]);
  }
}

// kVectors: rows are read as vectors. The order of the additions is the same for both.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kVectors ? 4 : 3)
    sum_tiles(const __grid_constant__ Params p) {
  using Piece = Columns<T, kVectors>;
  __shared__ alignas(16) float shared[kWarps][kColumns];
  const Matrix& m = p.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = threadIdx.x;
  const int64_t block_row = blockIdx.x / p.column_tiles;
  const int64_t column = static_cast<int64_t>(blockIdx.x % p.column_tiles) * kColumns;
  const int left = static_cast<int>(min(m.cols - column, int64_t{kColumns}));
  float total = 0.0f;
  for (int tile = 0; tile < p.tiles_per_block; ++tile) {
    const int64_t row = (block_row * p.tiles_per_block + tile) * kTile + warp * 16;
    const int rows = static_cast<int>(max(int64_t{0}, min(m.rows - row, int64_t{16})));
    float pairs[8] = {};
    add_rows<Piece>(static_cast<const T*>(m.data) + row * m.stride + column, m.stride, rows, lane,
                    left, pairs);
    if (tile > 0) __syncthreads();  // the tile before has been read
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[warp][Piece::position(lane, i)] = pairs[i];
    __syncthreads();
    float sum = shared[0][own];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum = __fadd_rn(sum, shared[i][own]);
    total = tile == 0 ? sum : __fadd_rn(total, sum);
  }
  if (own < left) p.sums[block_row * m.cols + column + own] = total;
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
void launch(const Params& p, unsigned blocks, bool reads_vectors, cudaStream_t stream) {
  if (reads_vectors)
    sum_tiles<T, /*kVectors=*/true><<<blocks, kThreads, 0, stream>>>(p);
  else
    sum_tiles<T, /*kVectors=*/false><<<blocks, kThreads, 0, stream>>>(p);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace

void launch_column_sums(const ColumnSumsDesc& desc, const ColumnSumsArguments& arguments,
                        cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const Matrix& x = arguments.x;
  const int64_t tiles = num_row_tiles(x.rows), column_tiles = (x.cols + kColumns - 1) / kColumns;
  const bool is_one_launch = tiles <= kFewTiles;
  const int64_t blocks = is_one_launch ? column_tiles : tiles * column_tiles;
  FP8CORE_CHECK(blocks < (int64_t{1} << 31), "column_sums: ", x.rows, " x ", x.cols,
                " elements, more than a grid takes");
  Params p;
  p.x = x;
  p.column_tiles = static_cast<unsigned>(column_tiles);
  p.tiles_per_block = is_one_launch ? static_cast<int>(tiles) : 1;
  p.sums = is_one_launch ? arguments.sums : arguments.workspace;
  with_type(desc.input, [&](auto type) {
    launch<ElementOf<type()>>(p, static_cast<unsigned>(blocks), reads_vectors(x, desc.input),
                              stream);
  });
  if (!is_one_launch) launch_add_parts(p.sums, tiles, x.cols, arguments.sums, stream);
}

void launch_add_parts(const float* parts, std::int64_t count, std::int64_t cols, float* sums,
                      cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((cols + 31) / 32);
  add_parts<<<blocks, 32 * kPartLanes, 0, stream>>>(parts, static_cast<int>(count), cols, sums);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
