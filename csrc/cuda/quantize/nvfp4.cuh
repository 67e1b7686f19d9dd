// NVFP4: two e2m1 codes a byte, an e4m3 scale for 16 elements, a float32 scale for the tensor.
//
// A block of 256 threads takes tiles of 128 x 128; a warp holds 16 rows x 128 columns, a thread 16
// rows x 4 columns. So a block of 16 along a column is one thread's, as is its Hadamard transform,
// and a block along a row lies in a quad of lanes.
//
// The columnwise codes go through shared memory in units of 8 bytes (16 rows of one column):
//
//     unit (column c, warp w) lies at [c / 2][(8 (c % 2) + w) ^ (c / 4 % 16)]
//
// A half-warp writes columns 4 apart, which the exclusive or spreads over all banks; pairs (2 v,
// 2 v + 1) stay adjacent, and are read back as 16 bytes.
#pragma once

#include "e2m1.cuh"
#include "nvfp4_strip.cuh"

namespace fp8core {

// Writes, for each block of threads, the largest magnitude in x and in the transformed x.
template <typename Strips>
__global__ void __launch_bounds__(kFp4Threads)
    transformed_amax(const __grid_constant__ Nvfp4Params p,
                     const __grid_constant__ typename Strips::Inputs inputs, unsigned tiles) {
  __shared__ float shared[2][kFp4Threads / 32];
  float largest = 0.0f, transformed_largest = 0.0f;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Strip<typename Strips::Value> x;
    Strips::load(x, p, inputs, StripOrigin(tile, p.tile_columns));
    largest = fmaxf(largest, strip_amax(x));
    transformed_largest = fmaxf(transformed_largest, strip_amax(transformed(x)));
  }
  largest = block_max<kFp4Threads>(largest, shared[0]);
  transformed_largest = block_max<kFp4Threads>(transformed_largest, shared[1]);
  if (threadIdx.x != 0) return;
  p.partials[blockIdx.x] = largest;
  p.partials[kMaxPartials + blockIdx.x] = transformed_largest;
}

// Those in x alone.
template <typename Strips>
__global__ void __launch_bounds__(kFp4Threads)
    strip_partials(const __grid_constant__ Nvfp4Params p,
                   const __grid_constant__ typename Strips::Inputs inputs, unsigned tiles) {
  __shared__ float shared[kFp4Threads / 32];
  float largest = 0.0f;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Strip<typename Strips::Value> x;
    Strips::load(x, p, inputs, StripOrigin(tile, p.tile_columns));
    largest = fmaxf(largest, strip_amax(x));
  }
  largest = block_max<kFp4Threads>(largest, shared);
  if (threadIdx.x == 0) p.partials[blockIdx.x] = largest;
}

// A block's elements are multiplied by a number that depends on the e4m3 code of its scale alone:
// a table holds it for each positive code.
constexpr int kScaleCodes = 128;

// The scales of one orientation. Source: docs/numerics.md, NVFP4BlockScaling.
struct SideScale {
  float per_target;
  const float* multipliers;  // [kScaleCodes], shared memory

  // Returns the e4m3 scales of four blocks, and sets their multipliers.
  __device__ uint32_t codes(const float (&amax)[4], float (&multiplier)[4]) const {
    const uint32_t bytes =
        encode4<Format::kE4M3>(__fmul_rn(amax[0], per_target), __fmul_rn(amax[1], per_target),
                               __fmul_rn(amax[2], per_target), __fmul_rn(amax[3], per_target));
#pragma unroll
    for (int i = 0; i < 4; ++i) multiplier[i] = multipliers[bytes >> 8 * i & 0xFF];
    return bytes;
  }
};

// Fills the table `multipliers`, which all threads may read after the next barrier.
__device__ inline SideScale side_scale(const Nvfp4Side& side, const Nvfp4Params& p, float* shared,
                                       float* multipliers) {
  const float amax = reduce_partials<kFp4Threads>(side.partials, p.num_partials, shared);
  float scale = fminf(__fdiv_rn(p.largest, amax), FLT_MAX);
  if (amax == 0.0f || isinf(amax)) scale = 1.0f;
  const float inverse = __frcp_rn(scale);
  if (blockIdx.x == 0 && threadIdx.x == 0) *side.global_scale_inv = inverse;
  if (threadIdx.x < kScaleCodes) {
    const uint32_t decoded = decode2_into_halves<Format::kE4M3>(threadIdx.x);
    const float code_value = static_cast<float>(reinterpret_cast<const __half2*>(&decoded)->x);
    multipliers[threadIdx.x] = fminf(__frcp_rn(__fmul_rn(code_value, inverse)), FLT_MAX);
  }
  return {__fmul_rn(scale, p.inverse_target), multipliers};
}

// The noise of 2 rows x 4 elements along k; docs/numerics.md says which `index` they have.
__device__ inline uint4 noise_block(const Nvfp4Side& side, uint2 key, int64_t index) {
  const auto low = static_cast<uint32_t>(index), high = static_cast<uint32_t>(index >> 32);
  return philox(make_uint4(low, high, side.counter.x, side.counter.y), key);
}

// Four codes of a row along k, before `settled`. `parity`, row % 2, chooses half of the noise.
template <bool kStochastic>
__device__ uint32_t encode_four(const float (&v)[4], uint4 noise, int parity) {
  if (!kStochastic) return e2m1_nearest(v);
  return parity == 0 ? e2m1_stochastic(v, noise.x, noise.y) : e2m1_stochastic(v, noise.z, noise.w);
}

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

// Maxima over the four lanes of a quad, which hold N values each. Lane q gets the maxima of the
// q-th N / 4 values, as its first N / 4. In each step two lanes exchange halves of the values they
// hold.
template <typename Bits, int N, typename Larger>
__device__ void quad_share(Bits (&values)[N], int lane, Larger larger) {
#pragma unroll
  for (int half = N / 2; half >= N / 4; half /= 2) {
    const int mask = half == N / 2 ? 2 : 1;
    const bool keeps_upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const Bits low = values[i], high = values[i + half];
      const Bits handed = __shfl_xor_sync(0xFFFFFFFFu, keeps_upper ? low : high, mask);
      values[i] = larger(keeps_upper ? high : low, handed);
    }
  }
}

template <typename Pair>
__device__ Pair as_pair(uint32_t bits) {
  return *reinterpret_cast<const Pair*>(&bits);
}

// Amaxes of the 16 rows over a quad: lane q gets those of rows 4 q .. 4 q + 3.
template <typename T>
__device__ void quad_row_amax(const Strip<T>& x, int lane, float (&amax)[4]) {
  if constexpr (std::is_same_v<T, float>) {
    float maxima[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) maxima[i] = x.row_amax(i);
    quad_share(maxima, lane, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < 4; ++i) amax[i] = maxima[i];
  } else {
    using Pair = typename Strip<T>::Pair;  // two rows an instruction
    const auto larger = [](uint32_t a, uint32_t b) {
      const Pair both = __hmax2(as_pair<Pair>(a), as_pair<Pair>(b));
      return *reinterpret_cast<const uint32_t*>(&both);
    };
    uint32_t maxima[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t even = x.row_maxima(2 * i), odd = x.row_maxima(2 * i + 1);
      maxima[i] = larger(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
    }
    quad_share(maxima, lane, larger);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Pair two = as_pair<Pair>(maxima[i]);
      amax[2 * i] = fmaxf(0.0f, static_cast<float>(two.x));
      amax[2 * i + 1] = fmaxf(0.0f, static_cast<float>(two.y));
    }
  }
}

// Each lane of a quad holds the low 16 bits of four rows; lane q gets the 64 bits of row q.
__device__ inline uint2 gather_row(const uint32_t (&part)[4], int lane) {
  const bool is_odd = (lane & 1) != 0, is_upper = (lane & 2) != 0;
  const uint32_t first = __byte_perm(part[0], part[1], 0x5410);
  const uint32_t second = __byte_perm(part[2], part[3], 0x5410);
  // Of two rows: quarters 0 or 1, and 2 or 3.
  const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, is_upper ? first : second, 2);
  const uint32_t low = is_upper ? got : first, high = is_upper ? second : got;
  // Of one row: quarters 0 and 2, or 1 and 3.
  const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
  const uint32_t kept = is_odd ? odd : even;
  const uint32_t beside = __shfl_xor_sync(0xFFFFFFFFu, is_odd ? even : odd, 1);
  const uint32_t front = is_odd ? beside : kept, back = is_odd ? kept : beside;
  return make_uint2(__byte_perm(front, back, 0x5410), __byte_perm(front, back, 0x7632));
}

template <bool kStochastic, typename T>
__device__ void cast_rows(const Strip<T>& x, const Nvfp4Params& p, const StripOrigin& at,
                          const SideScale& scale) {
  const Nvfp4Side& side = p.row;
  const Matrix& m = p.x;
  const bool is_inside = at.row < m.rows && at.column < m.cols;
  const int64_t block = at.column / kFp4Block;
  float amax[4], multipliers[4];
  if (p.is_square) {
    const float all = quad_max(strip_amax(x));
#pragma unroll
    for (int i = 0; i < 4; ++i) amax[i] = all;
  } else {
    quad_row_amax(x, at.lane, amax);
  }
  const int quarter = at.lane % 4;
  const uint32_t codes = scale.codes(amax, multipliers);
  if (p.is_square) {
    if (is_inside && quarter == 0)
      side.out.scales[block * side.out.pitch + at.row / kFp4Block] = static_cast<uint8_t>(codes);
  } else if (block * kFp4Block < m.cols && at.row < m.rows) {
    auto* to = side.out.scales + block * side.out.pitch + at.row + 4 * quarter;
    *reinterpret_cast<uint32_t*>(to) = codes;  // past the last row: padding of the pitch
  }
  const int64_t fours = (m.cols + 3) / 4;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    uint32_t parts[4];
    uint4 noise{};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * group + i;
      const float multiplier = __shfl_sync(0xFFFFFFFFu, multipliers[i], group, 4);
      float scaled[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) scaled[j] = __fmul_rn(x.at(row, j), multiplier);
      if (kStochastic && i % 2 == 0)
        noise = noise_block(side, p.key, (at.row + row) / 2 * fours + at.column / 4);
      parts[i] = encode_four<kStochastic>(scaled, noise, i % 2);
    }
    const uint2 mixed = gather_row(parts, at.lane);
    const uint2 whole = make_uint2(settled(mixed.x), settled(mixed.y));
    const int64_t row = at.row + 4 * group + quarter, column = block * kFp4Block;
    if (row >= m.rows || column >= m.cols) continue;
    uint8_t* to = side.out.codes + row * (m.cols / 2) + column / 2;
    if (p.vector_rows) {
      __stcs(reinterpret_cast<uint2*>(to), whole);
      continue;
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&whole);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + 2 * i < m.cols) to[i] = bytes[i];
    }
  }
}

__device__ inline uint2& parked_at(uint2* parked, int column, int warp) {
  return parked[column / 2 * 16 + ((column % 2 * 8 + warp) ^ (column / 4 % 16))];
}

template <bool kStochastic, typename T>
__device__ void park_cast_columns(const Strip<T>& x, const Nvfp4Params& p, const StripOrigin& at,
                                  const SideScale& scale, uint2* parked) {
  const Nvfp4Side& side = p.column;
  const Matrix& m = p.x;
  float amax[4], multiplier[4];
  x.column_amax(amax);
  if (p.is_square) {
    const float all = quad_max(fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3])));
#pragma unroll
    for (int j = 0; j < 4; ++j) amax[j] = all;
  }
  const uint32_t codes = scale.codes(amax, multiplier);
  if (at.row < p.column_rows && at.column < m.cols) {
    uint8_t* to = side.out.scales + at.row / kFp4Block * side.out.pitch;
    if (!p.is_square)
      *reinterpret_cast<uint32_t*>(to + at.column) = codes;  // past the last column: padding
    else if (at.lane % 4 == 0)
      to[at.column / kFp4Block] = static_cast<uint8_t>(codes);
  }
  const int64_t fours = (p.column_rows + 3) / 4;
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {  // columns pair and pair + 1 share their noise
    uint2 units[2];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      uint4 noise{};
      if (kStochastic)
        noise = noise_block(side, p.key, (at.column + pair) / 2 * fours + at.row / 4 + four);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int column = pair + odd;
        float scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scaled[i] = __fmul_rn(x.at(4 * four + i, column), multiplier[column]);
        const uint32_t part = encode_four<kStochastic>(scaled, noise, odd);
        uint32_t& word = four < 2 ? units[odd].x : units[odd].y;
        word = four % 2 == 0 ? part : settled(__byte_perm(word, part, 0x5410));
      }
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      parked_at(parked, at.lane * 4 + pair + odd, at.warp) = units[odd];
  }
}

template <typename T>
__device__ void cast_columns(const Strip<T>& x, const Nvfp4Params& p, const StripOrigin& at,
                             const SideScale& scale, uint2* parked) {
  if (p.column.is_stochastic)
    park_cast_columns</*kStochastic=*/true>(x, p, at, scale, parked);
  else
    park_cast_columns</*kStochastic=*/false>(x, p, at, scale, parked);
}

__device__ inline void store_parked(const Nvfp4Params& p, int64_t tile_row, int64_t tile_column,
                                    const uint2* parked) {
  const int64_t rows = p.column_rows;
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int index = pass * kFp4Threads + threadIdx.x;
    const int column_in_tile = index / 4, chunk = index % 4, swizzle = column_in_tile / 4 % 16;
    const uint4 pair = *reinterpret_cast<const uint4*>(
        &parked[column_in_tile / 2 * 16 + ((column_in_tile % 2 * 8 + 2 * chunk) ^ (swizzle & ~1))]);
    const uint4 codes = swizzle % 2 == 0 ? pair : make_uint4(pair.z, pair.w, pair.x, pair.y);
    const int64_t column = tile_column + column_in_tile, row = tile_row + chunk * 32;
    if (column >= p.x.cols || row >= rows) continue;
    uint8_t* to = p.column.out.codes + column * (rows / 2) + row / 2;
    if (p.vector_columns) {
      __stcs(reinterpret_cast<uint4*>(to), codes);
      continue;
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&codes);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (row + 2 * i < rows) to[i] = bytes[i];
    }
  }
}

// The sums of the strip's columns to shared memory: eight rows one after the other, and the next
// eight, then both; a warp has 16 rows, so the order is that of cuda/sums/column_sums.h.
template <typename T>
__device__ void park_strip_sums(const Strip<T>& x, const StripOrigin& at, float (*sums)[kTile]) {
  float both[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      first = __fadd_rn(first, x.at(i, j));
      second = __fadd_rn(second, x.at(8 + i, j));
    }
    both[j] = __fadd_rn(first, second);
  }
  *reinterpret_cast<float4*>(&sums[at.warp][at.lane * 4]) =
      make_float4(both[0], both[1], both[2], both[3]);
}

// After a barrier: the sums of the tile's columns, those of the warps one after the other.
__device__ inline void store_strip_sums(const Nvfp4Params& p, const StripOrigin& at,
                                        float* tile_sums, const float (*sums)[kTile]) {
  const int64_t tile_row = at.row / kTile, column = at.column - at.lane * 4 + threadIdx.x;
  if (threadIdx.x >= kTile || column >= p.x.cols) return;
  float sum = sums[0][threadIdx.x];
#pragma unroll
  for (int warp = 1; warp < kFp4Threads / 32; ++warp) sum = __fadd_rn(sum, sums[warp][threadIdx.x]);
  tile_sums[tile_row * p.x.cols + column] = sum;
}

template <typename Strips>
__device__ void cast_tile(const Nvfp4Params& p, const typename Strips::Inputs& inputs,
                          unsigned tile, const SideScale& row_scale, const SideScale& column_scale,
                          uint2* parked, float (*sums)[kTile]) {
  using T = typename Strips::Value;
  const StripOrigin at(tile, p.tile_columns);
  Strip<T> x;
  Strips::load(x, p, inputs, at);
  count_nonfinite<T, Strip<T>::kWords>([&](int i) { return x.word(i); }, p.nonfinite);
  const bool has_sums = inputs.tile_sums != nullptr, has_columns = p.column.out.codes != nullptr;
  if (has_sums) park_strip_sums(x, at, sums);
  if (p.row.out.codes != nullptr) {
    if (p.row.is_stochastic)
      cast_rows</*kStochastic=*/true>(x, p, at, row_scale);
    else
      cast_rows</*kStochastic=*/false>(x, p, at, row_scale);
  }
  if (has_columns) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (p.transforms) x = transformed(x);
      cast_columns(x, p, at, column_scale, parked);
    } else {
      if (p.transforms)
        cast_columns(transformed(x), p, at, column_scale, parked);
      else
        cast_columns(x, p, at, column_scale, parked);
    }
  }
  if (!has_columns && !has_sums) return;
  __syncthreads();
  if (has_sums) store_strip_sums(p, at, inputs.tile_sums, sums);
  if (has_columns) store_parked(p, at.row - at.warp * 16, at.column - at.lane * 4, parked);
}

template <typename Strips>
__global__ void __launch_bounds__(kFp4Threads, Strips::kBlocks)
    nvfp4_tile(const __grid_constant__ Nvfp4Params p,
               const __grid_constant__ typename Strips::Inputs inputs, unsigned tiles) {
  // Used in turn, so one barrier a tile will do.
  __shared__ alignas(16) uint2 parked[2][kTile * 8];
  __shared__ alignas(16) float sums[2][kFp4Threads / 32][kTile];
  __shared__ float shared[2][kFp4Threads / 32], multipliers[2][kScaleCodes];
  SideScale row{}, column{};
  if (p.row.out.codes != nullptr) row = side_scale(p.row, p, shared[0], multipliers[0]);
  if (p.column.out.codes != nullptr) column = side_scale(p.column, p, shared[1], multipliers[1]);
  __syncthreads();
  int turn = 0;
  for (unsigned done = blockIdx.x; done < tiles; done += gridDim.x, turn ^= 1)
    // x is read a second time, beginning at its end, which is still cached.
    cast_tile<Strips>(p, inputs, tiles - 1 - done, row, column, parked[turn], sums[turn]);
}

}  // namespace fp8core
