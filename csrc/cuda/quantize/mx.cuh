// MXFP8: an e8m0 scale for 32 elements of an operand's row, both orientations in one pass.
//
// The tile and the threads' 8 x 8 elements are those of tile_parts.cuh, but a warp holds 32 rows x
// 64 columns, so that no block of 32 needs another warp:
//
//     lane = r1 r0 c2 c1 c0 (bits):  row group ty = 4 band + 2 r0 + r1,  column group tx = 8 half
//     + 4 c2 + 2 c1 + c0
//
// A block along a row lies in the 4 lanes of c1 c0, one along a column in those of r1 r0.
#pragma once

#include "mx_params.h"
#include "tile_walk.cuh"

namespace fp8core {

// The exponent of amax / target, rounded up; inf gives 0xFE, values below 2^-127 give 0.
// Source: docs/numerics.md, MXFP8BlockScaling.
__device__ inline uint32_t e8m0_of(float amax, float inverse_target) {
  const uint32_t bits = __float_as_uint(amax * inverse_target);
  // 0eeeeeee emmmmmmm mmmmmmmm mmmmmmmm: adding 0x7FFFFF carries into e if m > 0. Where e is 0,
  // 2^-127 is m = 0x400000, and adding 0x3FFFFF carries if m is larger.
  const uint32_t carry = bits < 0x800000u ? 0x3FFFFFu : 0x7FFFFFu;
  return min((bits + carry) >> 23, 254u);
}

// 2^(127 - e): 0 (254 - e) 000...0 as bits; for e = 254 the subnormal 2^-127.
__device__ inline float multiplier_of(uint32_t e8m0) {
  return __uint_as_float(max((254u - e8m0) << 23, 0x00400000u));
}

// Eight maxima a lane, over the four lanes that differ in the bits `near` and `far`: their e8m0
// bytes, known to all four. Each lane computes two, as in row_amax.
__device__ inline uint2 shared_codes(float (&maxima)[8], int near, int far, float inverse_target) {
  const bool is_near = (threadIdx.x & near) != 0, is_far = (threadIdx.x & far) != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float handed = is_far ? maxima[i] : maxima[i + 4];
    maxima[i] =
        fmaxf(is_far ? maxima[i + 4] : maxima[i], __shfl_xor_sync(0xFFFFFFFFu, handed, far));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float handed = is_near ? maxima[i] : maxima[i + 2];
    maxima[i] =
        fmaxf(is_near ? maxima[i + 2] : maxima[i], __shfl_xor_sync(0xFFFFFFFFu, handed, near));
  }
  const uint32_t two = e8m0_of(maxima[0], inverse_target) | e8m0_of(maxima[1], inverse_target) << 8;
  const uint32_t beside = __shfl_xor_sync(0xFFFFFFFFu, two, near);
  const uint32_t four = is_near ? beside | two << 16 : two | beside << 16;
  const uint32_t others = __shfl_xor_sync(0xFFFFFFFFu, four, far);
  return is_far ? make_uint2(others, four) : make_uint2(four, others);
}

__device__ inline uint2 repeated(uint32_t code) {
  const uint32_t four = code * 0x01010101u;
  return make_uint2(four, four);
}

__device__ inline float multiplier_at(uint2 codes, int i) {
  return multiplier_of((i < 4 ? codes.x : codes.y) >> 8 * (i % 4) & 0xFF);
}

__device__ inline TilePlace place_in_mx_tile(unsigned thread) {
  const int lane = thread % 32, warp = thread / 32;
  return {warp / 2 * 4 + (lane >> 4 & 1) + (lane >> 3 & 1) * 2, warp % 2 * 8 + lane % 8};
}

template <typename Source>
constexpr int mx_blocks = Source::kDirectedBlocks;  // of threads, a multiprocessor
template <typename T>
inline constexpr int mx_blocks<MatrixSource<T>> = sizeof(T) == 4 ? 2 : 3;

template <typename Source, typename Encoding>
__global__ void __launch_bounds__(kTileThreads, mx_blocks<Source>)
    mx_tile(const __grid_constant__ CastParams<Source> params, const __grid_constant__ MxParams m) {
  using T = typename Source::Value;
  __shared__ alignas(16) uint2 parked[kTile * 16];
  __shared__ alignas(16) float parked_sums[kTile / 16][kTile];
  __shared__ typename Held<Source>::Waiting waiting;
  const TileParams& p = params.tile;
  const Encoding encoding(p);
  const auto cast_tile = [&](unsigned, const TileSpan& at, unsigned thread, const auto& take_rows) {
    const auto [ty, tx] = place_in_mx_tile(thread);
    Held<Source> held(take_rows, waiting);
    Eight<T>(&x)[8] = held.x;
#pragma unroll
    for (int part = 0; part < Source::kParts; ++part) {
      const TileSpan here = part_of(at, p, part);
      if (part > 0) held.next();
      count_tile(x, p);
      if (part > 0) __syncthreads();  // the shared memory of the part before is free
      if (params.inputs.tile_sums != nullptr) {
        float sums[8];
        add_rows<Source>(x, sums);
        park_sums(sums, parked_sums, ty, tx);
        __syncthreads();
        store_sums(p, here, params.inputs.tile_sums, parked_sums);
      }
      const int64_t row = here.row + ty * 8, column = here.column + tx * 8;
      const bool is_inside = row < here.row_end && column < here.column_end;
      uint2 square = make_uint2(0, 0);
      if (m.is_square) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = fmaxf(amax, x[i].amax());
#pragma unroll
        for (int i = 0; i < 4; ++i)  // lanes that differ in c0, c1, r0, r1
          amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, i < 2 ? 1 << i : 2 << i));
        square = repeated(e8m0_of(amax, m.inverse_target));
      }
      const int64_t block_row = row / kMxBlock, block_column = column / kMxBlock;
      const bool is_corner =
          m.is_square && is_inside && row % kMxBlock == 0 && column % kMxBlock == 0;
      if (p.args.rowwise.codes != nullptr) {
        const RowCodes row_codes(p, here, ty, tx);
        uint2 scales = square;
        if (!m.is_square) {
          float maxima[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) maxima[i] = x[i].amax();
          scales = shared_codes(maxima, 1, 2, m.inverse_target);
          // Of eight rows; the last of them may be padding of the pitch.
          if (is_inside && tx % 4 == 0)
            *reinterpret_cast<uint2*>(m.rowwise.scales + block_column * m.rowwise.pitch + row) =
                scales;
        } else if (is_corner) {
          m.rowwise.scales[block_column * m.rowwise.pitch + block_row] =
              static_cast<uint8_t>(scales.x);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          row_codes.store(i, encoding.row(unpacked<Source>(x[i]), multiplier_at(scales, i)));
      }
      if (p.args.columnwise.codes == nullptr) continue;
      uint2 scales = square;
      if (!m.is_square) {
        float maxima[8];
        column_maxima(x, maxima);
        scales = shared_codes(maxima, 8, 16, m.inverse_target);
        if (is_inside && ty % 4 == 0)
          *reinterpret_cast<uint2*>(m.columnwise.scales + block_row * m.columnwise.pitch + column) =
              scales;
      } else if (is_corner) {
        m.columnwise.scales[block_row * m.columnwise.pitch + block_column] =
            static_cast<uint8_t>(scales.x);
      }
      float multipliers[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) multipliers[j] = multiplier_at(scales, j);
      uint2 codes[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = encoding.row(unpacked<Source>(x[i]), multipliers);
      park_columns(codes, parked, ty, tx);
      __syncthreads();
      store_columns(p, here, parked, thread);
    }
  };
  for_tiles(params, place_in_mx_tile, cast_tile);
}

}  // namespace fp8core
