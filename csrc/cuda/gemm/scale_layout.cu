// Byte scales in the order in which the tensor cores of compute capability 10.0 read them.
//
// A tile holds the scales of 128 rows x 4 blocks of k; the scale of row r and block b lies at byte
//
//     (r % 32) * 16 + (r / 32) * 4 + b
//
// of its tile of 512 bytes. Tiles follow one another along k, then along the rows; scales beyond
// the operand are 0. Source: cuBLAS 13 documentation, "1D Block Scaling Factors Layout" under
// cublasLtMatmul(); cuDNN frontend, "MXFP8 scale factor 128x4 layout".

#include "scale_layout.h"

namespace fp8core {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128, kTileBlocks = 4, kLine = 16;

// One line of 16 bytes: rows r, r + 32, r + 64, r + 96 of a tile, four blocks each.
__device__ void write_line(const ScaleTiles& from, std::int64_t line) {
  const std::int64_t tile = line / 32, per_row = (from.blocks + kTileBlocks - 1) / kTileBlocks;
  const std::int64_t row = tile / per_row * kTileRows + line % 32;
  const std::int64_t block = tile % per_row * kTileBlocks;
  std::uint32_t words[4];
#pragma unroll
  for (int band = 0; band < 4; ++band) {
    words[band] = 0;
    const std::int64_t band_row = row + 32 * band;
    const std::uint8_t* scales = from.scales + band_row / from.rows_per_scale * from.row_stride;
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      if (band_row < from.rows && block + i < from.blocks)
        words[band] |= std::uint32_t{scales[(block + i) * from.block_stride]} << 8 * i;
    }
  }
  reinterpret_cast<uint4*>(from.to)[line] = make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(kThreads)
    arrange(const ScaleTiles a, const ScaleTiles b, std::int64_t a_lines, std::int64_t lines,
            GemmFactors* factors) {
  const std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (line == 0 && factors != nullptr)
    *factors = {*a.global_scale_inv * *b.global_scale_inv, 0.0f, 1.0f};
  if (line < a_lines)
    write_line(a, line);
  else if (line < lines)
    write_line(b, line - a_lines);
}

}  // namespace

void launch_arrange_scales(const ArrangeScalesArguments& arguments, int device,
                           cudaStream_t stream) {
  const ScaleTiles &a = arguments.a, &b = arguments.b;
  const std::int64_t a_bytes = tile_bytes(a.rows, a.blocks);
  const std::int64_t lines = (a_bytes + tile_bytes(b.rows, b.blocks)) / kLine;
  auto* factors =
      a.global_scale_inv == nullptr ? nullptr : reinterpret_cast<GemmFactors*>(a.to + a_bytes);
  const DeviceGuard guard(device);
  arrange<<<static_cast<unsigned>((lines + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      a, b, a_bytes / kLine, lines, factors);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
