// Where a cast's elements come from: a matrix, or a computation. A source gives each thread of a
// tile the 8 x 8 elements that the cast sees, row by row:
//
//     Value      their type
//     kParts     the parts of the result, side by side, of which a tile of inputs gives a tile each
//     kSums      whether kernels that know the scale before add up the result's columns
//     kReadBefore  whether a kernel has just read the inputs, whatever the granularity
//     tile_sums  of the inputs: where those sums of each tile go, or null
//     kBlocks, kDirectedBlocks    blocks of threads a multiprocessor: of uniform_tile, and of the
//                kernels that hold all elements
//     takes      which granularities are compiled
//     kFormats   and which formats
//     Inputs     its part of a kernel's parameters
//     Row        the inputs of eight elements of a row, in registers
//     load       loads rows of the thread's eight, from `first` on; zeros beyond the tensor's end
//     values     eight elements of each part, from a row's inputs
//
// Inputs of a computation are copied to shared memory before they are needed (tile_walk.cuh):
//
//     kRows      rows that are copied and read at once: 2 or 4
//     kStages    so many times kRows rows have memory
//     Stage      that memory, of all threads
//     Origin     where the inputs of the thread's rows are
//     copy       begins to copy rows from `first` on to a stage, and moves the origin on
//     read       reads them back
#pragma once

#include "tile_parts.cuh"

namespace fp8core {

template <typename Source>
struct CastParams {
  TileParams tile;
  typename Source::Inputs inputs;
  unsigned tiles = 0;
};

// The formats that a source is cast to: each with kernels of its own, by the same kernels, or one.
enum class Formats { kEach, kShared, kE4M3 };

// A matrix in memory.
template <typename T>
struct MatrixSource {
  using Value = T;
  using Row = Eight<T>;
  struct Inputs {
    static constexpr float* tile_sums = nullptr;
  };
  static constexpr int kParts = 1;
  static constexpr bool kSums = false, kReadBefore = false;
  // 64 registers a thread: 1 to 5 % faster than three blocks; with five, registers spill, and a
  // cast takes a third longer.
  static constexpr int kBlocks = 4, kDirectedBlocks = sizeof(T) == 4 ? 2 : 4;
  static constexpr bool takes(Granularity) { return true; }
  static constexpr Formats kFormats = Formats::kEach;

  const T* from;
  const TileParams& p;
  int rows, columns;  // that are left from the thread's first on

  __device__ MatrixSource(const Inputs&, const TileParams& p, const TileSpan& at, int ty, int tx)
      : p(p),
        rows(left_before(at.load_end, at.row + ty * 8)),
        columns(left_before(p.args.x.cols, at.column + tx * 8)) {
    from = static_cast<const T*>(p.args.x.data) + (at.row + ty * 8) * p.args.x.stride + at.column +
           tx * 8;
  }

  template <int kCount>
  __device__ void load(Row (&x)[kCount], int first) const {
    const int64_t stride = p.args.x.stride;
    if (p.vector_loads && columns > 0) {  // then there are eight
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (first + i < rows)
          x[i].load(from + (first + i) * stride);
        else
          x[i].gather(from, 0);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_inside = first + i < rows && columns > 0;
      x[i].gather(is_inside ? from + (first + i) * stride : from, is_inside ? columns : 0);
    }
  }
  __device__ void values(const Row& row_of_x, Eight<T> (&x)[1]) const { x[0] = row_of_x; }
};

// A matrix whose columns are added up: the gradient of a layer with a bias.
template <typename T>
struct SummedMatrixSource : MatrixSource<T> {
  struct Inputs {
    float* tile_sums;  // [rows of tiles, columns]
  };
  static constexpr bool kSums = true;
  static constexpr int kDirectedBlocks = 3;  // with four, registers spill
  static constexpr bool takes(Granularity granularity) {
    return granularity != Granularity::kBlock128;
  }
  static constexpr Formats kFormats = Formats::kShared;

  __device__ SummedMatrixSource(const Inputs&, const TileParams& p, const TileSpan& at, int ty,
                                int tx)
      : MatrixSource<T>({}, p, at, ty, tx) {}
};

template <typename Source>
constexpr bool is_matrix = false;
template <typename T>
inline constexpr bool is_matrix<MatrixSource<T>> = true;
template <typename T>
inline constexpr bool is_matrix<SummedMatrixSource<T>> = true;

// The elements that a thread holds: those of one part, and then of the other. A thread has no
// registers for all of two parts: some rows of the second wait in shared memory.
template <typename Source>
struct Held {
  using T = typename Source::Value;
  static constexpr int kBehind = 4, kWaiting = Source::kParts > 1 ? 8 - kBehind : 1;
  using Waiting = Eight<T>[kWaiting][kTileThreads];

  Eight<T> x[8];

  // take_rows: calls what it is given with each row's number, part and elements.
  template <typename TakeRows>
  __device__ Held(const TakeRows& take_rows, Waiting& waiting) : waiting_(waiting) {
    take_rows([&](int i, int part, const Eight<T>& eight) {
      if (part == 0)
        x[i] = eight;
      else if (i < kBehind)
        behind_[i] = eight;
      else
        waiting_[i - kBehind][threadIdx.x] = eight;
    });
  }
  // The second part takes the place of the first.
  __device__ void next() {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = i < kBehind ? behind_[i] : waiting_[i - kBehind][threadIdx.x];
  }

 private:
  Eight<T> behind_[kBehind];
  Waiting& waiting_;
};

// Held elements as the cast reads them. Computed ones, and those that are added up as well, are
// unpacked by integer operations, and before that made unknown to the compiler: it would hold each
// in a register of its own, or as a float from one use to the next, where two share a register.
template <typename Source>
__device__ auto unpacked(const Eight<typename Source::Value>& x) {
  using T = typename Source::Value;
  if constexpr (is_matrix<Source> && !Source::kSums) {
    return x;
  } else {
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t both = x.word(j);
      asm volatile("" : "+r"(both));
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        v[2 * j] = __uint_as_float(both << 16);
        v[2 * j + 1] = __uint_as_float(both & 0xFFFF0000u);
      } else {
        v[2 * j] = __half2float(__ushort_as_half(static_cast<uint16_t>(both)));
        v[2 * j + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(both >> 16)));
      }
    }
    return rounded<float>(v);
  }
}

// The largest magnitude of the elements that a thread sees, NaN or inf if one of them is.
template <typename T>
struct Seen {
  Largest<T> largest;

  __device__ void take(const Eight<T>& x) {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; ++i) largest.take(x.word(i));
  }
};

// What a thread has to record of its elements of each part: the largest magnitude so far in `amax`,
// and their NaN and inf in `nonfinite`, if that is not null. All threads of a warp call it. Where
// one of them saw a NaN or inf, all read their elements once more; the amax is that of the others
// and inf.
template <typename Source>
__device__ void record_elements(const Seen<typename Source::Value> (&seen)[Source::kParts],
                                const TileParams& p, const typename Source::Inputs& inputs,
                                unsigned tile, float (&amax)[Source::kParts]) {
  using T = typename Source::Value;
  bool is_finite = true;
#pragma unroll
  for (int part = 0; part < Source::kParts; ++part)
    is_finite = is_finite && seen[part].largest.is_finite();
  if (__all_sync(0xFFFFFFFFu, is_finite)) {
#pragma unroll
    for (int part = 0; part < Source::kParts; ++part)
      amax[part] = fmaxf(amax[part], seen[part].largest.amax());
    return;
  }
  unsigned thread = threadIdx.x;
  // Computed anew: the compiler would hold addresses for what hardly ever happens.
  asm volatile("" : "+r"(tile), "+r"(thread));
  const Source source(inputs, p, span_of_plain_tile(p, tile), thread / 16, thread % 16);
  int count[Source::kParts] = {};
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    typename Source::Row row[1];
    Eight<T> x[Source::kParts];
    source.load(row, i);
    source.values(row[0], x);
#pragma unroll
    for (int part = 0; part < Source::kParts; ++part) {
      amax[part] = fmaxf(amax[part], x[part].amax());
#pragma unroll
      for (int j = 0; j < Eight<T>::kWords; ++j) count[part] += nonfinite_in<T>(x[part].word(j));
    }
  }
#pragma unroll
  for (int part = 0; part < Source::kParts; ++part) {
    const int total = __reduce_add_sync(0xFFFFFFFFu, count[part]);
    unsigned long long* nonfinite = slots_of(p, part).nonfinite;
    if (nonfinite != nullptr && threadIdx.x % 32 == 0)
      atomicAdd(nonfinite, static_cast<unsigned long long>(total));
  }
}

// The sums of the thread's eight rows of each of its columns.
template <typename Source>
__device__ void add_rows(const Eight<typename Source::Value> (&x)[8], float (&sums)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto row = unpacked<Source>(x[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(sums[j], row[j]);
  }
}

// Puts the sums of 16 rows of each column into shared memory: [ty / 2][column]. The lanes of an
// even row group and the next are 16 apart.
__device__ inline void park_sums(const float (&sums)[8], float (*shared)[kTile], int ty, int tx) {
  float both[8];
#pragma unroll
  for (int j = 0; j < 8; ++j)
    both[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xFFFFFFFFu, sums[j], 16));
  if (ty % 2 == 1) return;
  auto* to = reinterpret_cast<float4*>(&shared[ty / 2][tx * 8]);
  to[0] = make_float4(both[0], both[1], both[2], both[3]);
  to[1] = make_float4(both[4], both[5], both[6], both[7]);
}

// After a barrier: writes the sums of the tile's columns, in the same order in every run.
__device__ inline void store_sums(const TileParams& p, const TileSpan& at, float* tile_sums,
                                  const float (*shared)[kTile]) {
  const int64_t column = at.column + threadIdx.x;
  if (threadIdx.x >= kTile || column >= at.column_end) return;
  float sum = shared[0][threadIdx.x];
#pragma unroll
  for (int pair = 1; pair < kTile / 16; ++pair) sum = __fadd_rn(sum, shared[pair][threadIdx.x]);
  tile_sums[at.tile_row * p.args.x.cols + column] = sum;
}

}  // namespace fp8core
