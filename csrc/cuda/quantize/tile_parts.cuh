// The steps of a cast. A block of 256 threads takes a tile of 128 x 128 elements from a source
// (source.cuh), and writes its codes and their transpose.
//
// Thread (ty, tx), 16 x 16, holds 8 rows x 8 columns: rows 8 ty .. 8 ty + 7, columns 8 tx .. 8 tx
// + 7. A row of the tile is read as 16 x 16 bytes (2 bytes an element) and written as 16 x 8 bytes.
// The transpose goes through shared memory in units of 8 bytes (8 rows of one column):
//
//     unit (column c, row group ty) lies at [c][turn(ty) ^ (c / 8)]
//
// The exclusive or spreads the 16 units that a half-warp writes over all 32 banks, and keeps each
// pair (2 v, 2 v + 1) adjacent, so that it is read back as 16 bytes. Where a half-warp holds two
// row groups of 8 threads each (mx.cuh), `turn` puts them into different halves of the 16.
#pragma once

#include <type_traits>

#include "../groups.cuh"
#include "amax.cuh"
#include "tile_params.h"

namespace fp8core {

constexpr int kTileThreads = 256;

// Which rows and columns of a tile a thread holds.
struct TilePlace {
  int ty, tx;
};
__device__ inline TilePlace place_of_thread(unsigned thread) {
  return {static_cast<int>(thread / 16), static_cast<int>(thread % 16)};
}

struct TileSpan {
  int64_t row, column;  // of the tile's first element
  int64_t column_end;   // of the part's columns
  int64_t tile_row, tile_column;
  int64_t row_end, load_end;  // of the group's rows; load_end is 0 in the tail, which is not read
  int64_t code, code_end;     // row and, with the zeros behind it, row_end in columnwise codes
  int64_t group;              // 0 without groups
  bool is_first;              // in the group's first row of tiles
  bool is_tail;               // in rows that belong to no group
};

// Of rows that are not in groups.
__device__ inline TileSpan span_of_plain_tile(const TileParams& p, unsigned tile) {
  TileSpan at;
  at.tile_row = tile / p.tile_columns;
  at.tile_column = tile % p.tile_columns;
  at.column = at.tile_column * kTile;
  at.column_end = p.part_columns;
  at.row = at.tile_row * kTile;
  at.row_end = at.load_end = p.args.x.rows;
  at.code = at.row;
  at.code_end = p.column_codes;
  at.group = 0;
  at.is_first = at.tile_row == 0;
  at.is_tail = false;
  return at;
}

__device__ inline TileSpan span_of_tile(const TileParams& p, unsigned tile) {
  TileSpan at = span_of_plain_tile(p, tile);
  const Groups& groups = p.args.groups;
  if (groups.offsets == nullptr) return at;
  const int count = static_cast<int>(groups.count), rows = static_cast<int>(p.args.x.rows);
  const int tile_row = static_cast<int>(at.tile_row);
  const GroupSpan span = group_of_block(groups.offsets, count, rows, tile_row);
  const int64_t offset = static_cast<int64_t>(tile_row - span.first_block) * kTile;
  const int64_t first_code = static_cast<int64_t>(span.first_step) * kGroupStep;
  at.row = span.start + offset;
  at.code = first_code + offset;
  at.row_end = span.end;
  at.group = span.group;
  at.is_first = tile_row == span.first_block;
  at.is_tail = span.group == count;
  at.load_end = at.is_tail ? 0 : at.row_end;
  at.code_end = at.is_tail ? p.args.column_pitch
                           : first_code + group_steps(span.end - span.start) * kGroupStep;
  return at;
}

// The same tile of another part of the result, whose columns lie behind those of the parts before.
__device__ inline TileSpan part_of(TileSpan at, const TileParams& p, int part) {
  at.column += part * p.part_columns;
  at.column_end += part * p.part_columns;
  at.tile_column += part * p.tile_columns;
  return at;
}

// What a part is cast by.
__device__ inline CastSlots slots_of(const TileParams& p, int part) {
  if (part > 0 && p.is_split) return p.second;
  const QuantizeArguments& args = p.args;
  return {args.rowwise.scale_inv, args.scale, args.amax_out, args.nonfinite, args.workspace};
}

// How many rows or columns are left before `end`, from `first` on; negative behind it, and not more
// than kMany. It is not clamped to 0 and 8: ptxas of CUDA 13.0 takes a negative number for 8 where
// a number clamped to these is compared with 8.
constexpr int kMany = 1 << 20;
__device__ inline int left_before(int64_t end, int64_t first) {
  return static_cast<int>(min(end - first, int64_t{kMany}));
}

// Counts the NaN and inf that the threads hold of a part; rows of no group are not loaded.
template <typename T>
__device__ void count_tile(const Eight<T> (&x)[8], const TileParams& p, int part = 0) {
  constexpr int kEach = Eight<T>::kWords;
  count_nonfinite<T, 8 * kEach>([&](int i) { return x[i / kEach].word(i % kEach); },
                                slots_of(p, part).nonfinite);
}

// Stores eight codes, or the first `count`, one by one: in little code, as most tensors have none
// of these.
__device__ inline void store_bytes(uint8_t* to, uint2 codes, int count) {
  uint64_t bits = static_cast<uint64_t>(codes.y) << 32 | codes.x;
#pragma unroll 1
  for (int i = 0; i < 8 && i < count; ++i, bits >>= 8) to[i] = static_cast<uint8_t>(bits);
}

// Where the codes of a thread's eight rows go.
class RowCodes {
 public:
  __device__ RowCodes(const TileParams& p, const TileSpan& at, int ty, int tx)
      : pitch_(p.args.x.cols), vectors_(p.vector_rows) {
    const int64_t row = at.row + ty * 8, column = at.column + tx * 8;
    to_ = p.args.rowwise.codes + row * pitch_ + column;
    columns_ = left_before(at.column_end, column);
    rows_ = columns_ > 0 ? left_before(at.row_end, row) : 0;
  }

  // Vectors of eight codes are in a row or behind it.
  __device__ void store(int i, uint2 codes) const {
    if (i >= rows_) return;
    uint8_t* to = to_ + i * pitch_;
    if (vectors_) {
      __stcs(reinterpret_cast<uint2*>(to), codes);
      return;
    }
    store_bytes(to, codes, columns_);
  }

 private:
  const int64_t pitch_;
  const bool vectors_;
  uint8_t* to_;         // of the first row
  int rows_, columns_;  // that are left from the first on
};

// Words of four rows, four bytes each, become words of four columns.
__device__ inline void transpose4(uint32_t (&w)[4]) {
  const uint32_t t0 = __byte_perm(w[0], w[1], 0x5140);  // a0 b0 a1 b1
  const uint32_t t1 = __byte_perm(w[2], w[3], 0x5140);  // c0 d0 c1 d1
  const uint32_t t2 = __byte_perm(w[0], w[1], 0x7362);  // a2 b2 a3 b3
  const uint32_t t3 = __byte_perm(w[2], w[3], 0x7362);  // c2 d2 c3 d3
  w[0] = __byte_perm(t0, t1, 0x5410);
  w[1] = __byte_perm(t0, t1, 0x7632);
  w[2] = __byte_perm(t2, t3, 0x5410);
  w[3] = __byte_perm(t2, t3, 0x7632);
}

// Bits 1 and 3 of a row group change places.
__device__ inline int turn(int ty) { return (ty & 5) | (ty & 2) << 2 | (ty & 8) >> 2; }

// Puts the thread's codes into shared memory, transposed; codes[i] are the eight bytes of row
// 8 ty + i. After a barrier, store_columns writes them out.
__device__ inline void park_columns(const uint2 (&codes)[8], uint2* shared, int ty, int tx) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // columns 0-3, 4-7 of the thread
    uint32_t top[4], bottom[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = half == 0 ? codes[i].x : codes[i].y;
      bottom[i] = half == 0 ? codes[4 + i].x : codes[4 + i].y;
    }
    transpose4(top);
    transpose4(bottom);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = tx * 8 + half * 4 + j;
      shared[column * 16 + (turn(ty) ^ tx)] = make_uint2(top[j], bottom[j]);
    }
  }
}

__device__ inline void store_columns(const TileParams& p, const TileSpan& at, const uint2* shared,
                                     unsigned thread) {
  constexpr int kAtOnce = kTileThreads / 8;  // columns, whose 128 codes eight threads store
  const int chunk = thread % 8, first = thread / 8;
  const int64_t row = at.code + chunk * 16, column = at.column + first;
  const int codes_left = left_before(at.code_end, row),
            columns_left = left_before(at.column_end, column);
  if (codes_left <= 0) return;
  uint8_t* to = p.args.columnwise.codes + column * p.args.column_pitch + row;
  const int swizzle = first / 8, unit = turn(2 * chunk) ^ (swizzle & ~1);
  const bool vectors = p.vector_columns && codes_left >= 16;
#pragma unroll
  for (int pass = 0; pass < kTile / kAtOnce; ++pass) {
    if (pass * kAtOnce >= columns_left) return;
    const uint4 pair = *reinterpret_cast<const uint4*>(
        &shared[(pass * kAtOnce + first) * 16 + (unit ^ pass * (kAtOnce / 8))]);
    const uint4 codes = swizzle % 2 == 0 ? pair : make_uint4(pair.z, pair.w, pair.x, pair.y);
    if (vectors) {
      __stcs(reinterpret_cast<uint4*>(to), codes);
    } else {
      store_bytes(to, make_uint2(codes.x, codes.y), codes_left);
      store_bytes(to + 8, make_uint2(codes.z, codes.w), codes_left - 8);
    }
    to += kAtOnce * p.args.column_pitch;
  }
}

template <Format F, typename T>
__device__ uint2 encode_row(const Eight<T>& x, float scale) {
  return make_uint2(encode4<F>(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
                    encode4<F>(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale));
}

template <Format F, typename T>
__device__ uint2 encode_row(const Eight<T>& x, const float (&scale)[8]) {
  return make_uint2(encode4<F>(x[0] * scale[0], x[1] * scale[1], x[2] * scale[2], x[3] * scale[3]),
                    encode4<F>(x[4] * scale[4], x[5] * scale[5], x[6] * scale[6], x[7] * scale[7]));
}

// Codes of the format that a kernel is compiled for.
template <Format F>
struct Encoder {
  __device__ explicit Encoder(const TileParams&) {}
  template <typename Elements, typename Scale>
  __device__ uint2 row(const Elements& x, const Scale& scale) const {
    return encode_row<F>(x, scale);
  }
};

// Codes of either format, which are told apart for each row of eight elements.
struct EitherEncoder {
  bool is_e4m3;

  __device__ explicit EitherEncoder(const TileParams& p) : is_e4m3(p.format == Format::kE4M3) {}
  template <typename Elements, typename Scale>
  __device__ uint2 row(const Elements& x, const Scale& scale) const {
    return is_e4m3 ? encode_row<Format::kE4M3>(x, scale) : encode_row<Format::kE5M2>(x, scale);
  }
};

// Amaxes of eight columns over rows that are taken one by one.
template <typename T>
struct ColumnMaxima {
  using Pair = typename Largest<T>::Pair;
  uint4 pairs = {0, 0, 0, 0};

  __device__ void take(const Eight<T>& x) {
    take(pairs.x, x.bits.x);
    take(pairs.y, x.bits.y);
    take(pairs.z, x.bits.z);
    take(pairs.w, x.bits.w);
  }
  static __device__ void take(uint32_t& pair, uint32_t word) {  // NaN is left out
    const Pair larger = __hmax2(*reinterpret_cast<const Pair*>(&pair),
                                __habs2(*reinterpret_cast<const Pair*>(&word)));
    pair = *reinterpret_cast<const uint32_t*>(&larger);
  }
  __device__ void read(float (&maxima)[8]) const {
    Eight<T> eight;
    eight.bits = pairs;
#pragma unroll
    for (int j = 0; j < 8; ++j) maxima[j] = eight[j];
  }
};

template <>
struct ColumnMaxima<float> {
  float maxima[8] = {};

  __device__ void take(const Eight<float>& x) {
#pragma unroll
    for (int j = 0; j < 8; ++j) maxima[j] = fmaxf(maxima[j], fabsf(x[j]));
  }
  __device__ void read(float (&result)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) result[j] = maxima[j];
  }
};

// Amaxes of the thread's eight columns over its eight rows.
template <typename T>
__device__ void column_maxima(const Eight<T> (&x)[8], float (&maxima)[8]) {
  ColumnMaxima<T> columns;
#pragma unroll
  for (int i = 0; i < 8; ++i) columns.take(x[i]);
  columns.read(maxima);
}

// Amaxes of the tile's columns over its 128 rows, from those of the thread's eight rows: thread t <
// 128 gets that of column t.
__device__ inline float column_amax(float (&maxima)[8], float (*shared)[kTile], int tx) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    maxima[j] = fmaxf(maxima[j], __shfl_xor_sync(0xFFFFFFFFu, maxima[j], 16));
  if (threadIdx.x % 32 < 16) {
    auto* to = reinterpret_cast<float4*>(&shared[warp][tx * 8]);
    to[0] = make_float4(maxima[0], maxima[1], maxima[2], maxima[3]);
    to[1] = make_float4(maxima[4], maxima[5], maxima[6], maxima[7]);
  }
  __syncthreads();
  float largest = 0.0f;
  if (threadIdx.x < kTile) {
#pragma unroll
    for (int i = 0; i < kTileThreads / 32; ++i) largest = fmaxf(largest, shared[i][threadIdx.x]);
  }
  return largest;
}

// Amaxes of the tile's rows, from those of each row's eight columns that the thread has: thread
// (ty, tx) gets that of row 8 ty + tx / 2. Of the rows that two threads both have, each keeps half
// and hands on the other half, so that the work halves with every step: 8 exchanges for 8 rows
// instead of 32.
__device__ inline float row_amax(float (&maxima)[8], int tx) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool keeps_upper = (tx & (2 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = keeps_upper ? maxima[i + half] : maxima[i];
      const float handed = keeps_upper ? maxima[i] : maxima[i + half];
      maxima[i] = fmaxf(kept, __shfl_xor_sync(0xFFFFFFFFu, handed, 2 * half));
    }
  }
  return fmaxf(maxima[0], __shfl_xor_sync(0xFFFFFFFFu, maxima[0], 1));
}

template <typename T>
__device__ float column_amax(const Eight<T> (&x)[8], float (*shared)[kTile], int tx) {
  float maxima[8];
  column_maxima(x, maxima);
  return column_amax(maxima, shared, tx);
}

template <typename T>
__device__ float row_amax(const Eight<T> (&x)[8], int tx) {
  float maxima[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) maxima[i] = x[i].amax();
  return row_amax(maxima, tx);
}

}  // namespace fp8core
