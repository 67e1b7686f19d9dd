// Tiles of 128 x 128 codes, which go through shared memory as those of a cast do (tile_parts.cuh).
#include "transpose.h"

#include "../quantize/tile_parts.cuh"

namespace fp8core {
namespace {

constexpr int kChunk = 16;  // codes of a column that a thread stores at once

// Codes 16 chunk to 16 chunk + 15 of a column, from where park_columns has put them.
__device__ uint4 parked(const uint2* shared, int column, int chunk) {
  const int swizzle = column / 8, unit = turn(2 * chunk) ^ (swizzle & ~1);
  const uint4 pair = *reinterpret_cast<const uint4*>(&shared[column * 16 + unit]);
  return swizzle % 2 == 0 ? pair : make_uint4(pair.z, pair.w, pair.x, pair.y);
}

__global__ void __launch_bounds__(kTileThreads) transpose_tile(const TransposeArguments p) {
  __shared__ alignas(16) uint2 shared[kTile * 16];
  const int64_t tile_row = int64_t{blockIdx.y} * kTile, tile_column = int64_t{blockIdx.x} * kTile;
  const auto [ty, tx] = place_of_thread(threadIdx.x);
  const int64_t row = tile_row + ty * 8, column = tile_column + tx * 8;
  // Eight rows and eight columns are either in the tensor or behind it.
  uint2 codes[8] = {};
  if (row < p.rows && column < p.cols) {
    const uint8_t* from = p.codes + row * p.cols + column;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      codes[i] = __ldcs(reinterpret_cast<const uint2*>(from + i * p.cols));
  }
  park_columns(codes, shared, ty, tx);
  __syncthreads();
  constexpr int kAtOnce = kTileThreads / (kTile / kChunk);  // columns
  const int chunk = threadIdx.x % (kTile / kChunk), first = threadIdx.x / (kTile / kChunk);
  const int64_t code = tile_row + chunk * kChunk;
  if (code >= p.rows) return;
#pragma unroll
  for (int pass = 0; pass < kTile / kAtOnce; ++pass) {
    const int at = pass * kAtOnce + first;
    if (tile_column + at >= p.cols) return;
    uint8_t* to = p.transposed + (tile_column + at) * p.rows + code;
    *reinterpret_cast<uint4*>(to) = parked(shared, at, chunk);
  }
}

}  // namespace

void launch_transpose(const TransposeDesc& desc, const TransposeArguments& arguments,
                      cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const auto tiles = [](std::int64_t size) {
    return static_cast<unsigned>((size + kTile - 1) / kTile);
  };
  transpose_tile<<<dim3(tiles(arguments.cols), tiles(arguments.rows)), kTileThreads, 0, stream>>>(
      arguments);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
