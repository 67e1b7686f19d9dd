// d[m, n] = a[m, k] @ b[n, k].T for few rows m, of codes of e4m3 in b, and in a likewise or of 16
// bits in high precision: bound by the bytes of b, each of which is read once.
//
// The tensor cores multiply 16 rows of b by 8 rows of a in 16 bits, which hold every value of e4m3,
// and add in float32: a warp's instruction for FP8 is the same, converted by the compiler. Which
// elements of k go into one instruction is free as long as they are the same of both operands, so a
// thread reads 16 adjacent elements of a row: 64 of k by the four threads of a row, in four
// instructions.
//
//     thread t of a warp, of each 64 elements of k: those from 16 (t % 4) to 16 (t % 4) + 15
//         of rows t / 4 and t / 4 + 8 of 16 rows of b, and of row t / 4 of 8 rows of a
//     holds the sums of rows t / 4, t / 4 + 8 of b and rows 2 (t % 4), 2 (t % 4) + 1 of a
//
// Each thread copies what it reads into a ring of its own in shared memory, a block of 128
// elements of k a stage; so nothing but its scales passes between threads until the sums are added.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../cluster.cuh"
#include "../copies.cuh"
#include "../fp8.cuh"
#include "../groups.cuh"
#include "../mma.cuh"
#include "few_rows.h"
#include "values.cuh"

namespace fp8core::few_rows {

// Four codes as two pairs of values: a register each of an operand of `multiply`.
template <bool kIsBFloat16>
__device__ void decode(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  decode4_into_halves(codes, low, high);
  if constexpr (kIsBFloat16) {
    const auto widen = [](std::uint32_t& pair) {
      const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      const __nv_bfloat162 wide = __floats2bfloat162_rn(values.x, values.y);
      pair = *reinterpret_cast<const std::uint32_t*>(&wide);
    };
    widen(low), widen(high);
  }
}

__device__ inline std::uint32_t word(const uint4& words, int at) {
  return at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
}

// kRowTiles: eights of rows of a. kA: e4m3, or 16 bits without a scale. kHasBlocks: the scales are
// of blocks along k.
template <int kCut, int kRows8, ElementType kA, bool kHasScalesOfBlocks>
struct Tile {
  static constexpr Cut kIts = kCuts[kCut];
  static constexpr int kRowTiles = kRows8, kColumnTiles = kIts.column_tiles;
  static constexpr int kWarpsN = kIts.warps_n, kWarpsK = kIts.warps_k;
  static constexpr bool kHasBlocks = kHasScalesOfBlocks;
  static constexpr bool kIsCoded = kA == ElementType::kE4M3;
  static constexpr bool kIsBFloat16 = kA == ElementType::kBFloat16;
  static constexpr int kElement = kIsCoded ? 1 : 2;  // bytes of an element of a
  static constexpr int kThreads = 32 * kWarpsN * kWarpsK;
  static constexpr int kRows = 8 * kRowTiles;             // of a
  static constexpr int kWarpColumns = 16 * kColumnTiles;  // rows of b
  static constexpr int kColumns = kWarpColumns * kWarpsN;
  static constexpr int kPieces = 4 * kColumnTiles + 2 * kElement * kRowTiles;  // of 16 bytes
  static constexpr int kScales = kHasBlocks ? kWarpColumns + (kIsCoded ? kRows : 0) : 0;
  static constexpr int kStageBytes = kPieces * 32 * 16 + kScales * 4;  // of a warp
  static constexpr int kPitch = kColumns + 4;                    // of sums: spreads them over banks
  static constexpr int kStep = kStageBytes * kWarpsN * kWarpsK;  // bytes of a stage
  static constexpr int kFitting = kMostShared / kStep;
  static constexpr int kStages = kFitting < 2 ? 2 : kIts.stages < kFitting ? kIts.stages : kFitting;
  static constexpr int kRing = kStep * kStages;
  static constexpr int kSums = kWarpsK * kRows * kPitch * 4;
  static constexpr int kShared = kRing > kSums ? kRing : kSums;
};

// What a thread copies and multiplies.
template <typename T>
struct Worker {
  static constexpr int kRowTiles = T::kRowTiles, kColumnTiles = T::kColumnTiles;
  using Sums = float[kColumnTiles][kRowTiles][4];

  const Params& p;
  const std::uint8_t* b[kColumnTiles][2];
  const std::uint8_t* a[kRowTiles];
  const float* b_scale;
  const float* a_scale[(T::kRows + 31) / 32];
  std::uint8_t* ring;  // of the warp
  int lane;

  // `column`: the first of the warp. Rows beyond the last repeat it: their sums are not stored.
  __device__ Worker(const Params& params, std::uint8_t* shared, int warp, int column)
      : p(params), ring(shared + warp * (T::kStageBytes * T::kStages)), lane(threadIdx.x % 32) {
    const int row = lane / 4, piece = lane % 4 * 16;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        b[j][half] = p.b +
                     static_cast<std::int64_t>(min(column + 16 * j + 8 * half + row, p.n - 1)) *
                         p.b_leading +
                     piece;
    b_scale = p.b_scale + min(column + lane, p.n - 1) / p.b_rows * p.b_row_stride;
#pragma unroll
    for (int i = 0; i < (T::kRows + 31) / 32; ++i)
      a_scale[i] = p.a_scale + min(lane + 32 * i, p.m - 1) / p.a_rows * p.a_row_stride;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      a[i] = p.a + (static_cast<std::int64_t>(min(8 * i + row, p.m - 1)) * p.a_leading + piece) *
                       T::kElement;
  }

  __device__ uint4* pieces(int stage) const {
    return reinterpret_cast<uint4*>(ring + stage * T::kStageBytes) + lane;
  }
  __device__ float* scales(int stage) const {
    return reinterpret_cast<float*>(ring + stage * T::kStageBytes + T::kPieces * 512);
  }

  // Begins to copy a block of k, zeros where k ends.
  __device__ void copy(int stage, int block) const {
    uint4* to = pieces(stage);
    const int k = block * kBlockK;
#pragma unroll
    for (int half_k = 0; half_k < 2; ++half_k) {
      const int at = k + 64 * half_k;
      const bool is_wanted = at + lane % 4 * 16 < p.k;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_16_bytes(to, b[j][half] + at, is_wanted);
          to += 32;
        }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int part = 0; part < T::kElement; ++part) {
          copy_16_shared_bytes(to, a[i] + at * T::kElement + 16 * part, is_wanted);
          to += 32;
        }
      }
    }
    if constexpr (T::kHasBlocks) {
      float* to_scale = scales(stage) + lane;
      if (lane < T::kWarpColumns) copy_float(to_scale, b_scale + block * p.b_k_stride, true);
      if constexpr (T::kIsCoded) {
#pragma unroll
        for (int i = 0; i < (T::kRows + 31) / 32; ++i)
          if (lane + 32 * i < T::kRows)
            copy_float(to_scale + T::kWarpColumns + 32 * i, a_scale[i] + block * p.a_k_stride,
                       true);
      }
    }
  }

  // Adds the products of a block of k.
  __device__ void multiply_block(int stage, Sums& sums) const {
    const uint4* from = pieces(stage);
#pragma unroll
    for (int half_k = 0; half_k < 2; ++half_k) {
      uint4 b_codes[kColumnTiles][2], a_parts[kRowTiles][T::kElement];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          b_codes[j][half] = *from;
          from += 32;
        }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int part = 0; part < T::kElement; ++part) {
          a_parts[i][part] = *from;
          from += 32;
        }
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        std::uint32_t b_values[kColumnTiles][4];
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            decode<T::kIsBFloat16>(word(b_codes[j][half], at), b_values[j][half],
                                   b_values[j][half + 2]);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          std::uint32_t a_values[2];
          if constexpr (T::kIsCoded) {
            decode<false>(word(a_parts[i][0], at), a_values[0], a_values[1]);
          } else {
            a_values[0] = word(a_parts[i][at / 2], at % 2 * 2);
            a_values[1] = word(a_parts[i][at / 2], at % 2 * 2 + 1);
          }
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j)
            multiply<T::kIsBFloat16>(sums[j][i], b_values[j], a_values);
        }
      }
    }
  }

  // The same, times the block's scales.
  __device__ void multiply_scaled(int stage, Sums& sums) const {
    Sums block_sums = {};
    multiply_block(stage, block_sums);
    const float* scale = scales(stage);
    const float* a_scales = scale + T::kWarpColumns + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const float of_b = scale[16 * j + at / 2 * 8 + lane / 4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
          sums[j][i][at] +=
              block_sums[j][i][at] * (T::kIsCoded ? a_scales[8 * i + at % 2] * of_b : of_b);
      }
  }
};

// Writes a thread's sums to [kWarpsK, kRows, kPitch].
template <typename T>
__device__ void store_sums(const typename Worker<T>::Sums& sums, float* shared, int warp_n,
                           int warp_k) {
  const int lane = threadIdx.x % 32;
  float* to = shared + (warp_k * T::kRows + 2 * (lane % 4)) * T::kPitch + warp_n * T::kWarpColumns +
              lane / 4;
#pragma unroll
  for (int j = 0; j < T::kColumnTiles; ++j)
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i)
#pragma unroll
      for (int at = 0; at < 4; ++at)
        to[(8 * i + at % 2) * T::kPitch + 16 * j + at / 2 * 8] = sums[j][i][at];
}

// The sum over the warps that shared the blocks of k.
template <typename T>
__device__ float sum_of_warps(const float* from) {
  float sum = *from;
#pragma unroll
  for (int other = 1; other < T::kWarpsK; ++other) sum += from[other * T::kRows * T::kPitch];
  return sum;
}

// A block's part of a product.
template <typename T>
__device__ __forceinline__ void multiply_rows(const Params& p) {
  constexpr int kWarpsK = T::kWarpsK, kStages = T::kStages;
  extern __shared__ __align__(16) std::uint8_t shared[];
  const int warp = threadIdx.x / 32, warp_n = warp % T::kWarpsN, warp_k = warp / T::kWarpsN;
  const int first_column = blockIdx.x * T::kColumns, split = blocks_of_split(), rank = blockIdx.y;
  const Worker<T> worker(p, shared, warp, first_column + warp_n * T::kWarpColumns);

  // This block of threads has the blocks of k from `begin` to `end`, a warp every kWarpsK-th.
  const auto blocks = static_cast<std::int64_t>((p.k + kBlockK - 1) / kBlockK);
  const int begin = static_cast<int>(blocks * rank / split);
  const int end = static_cast<int>(blocks * (rank + 1) / split);
  int copied = begin + warp_k;  // the next to copy
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage, copied += kWarpsK) {
    if (copied < end) worker.copy(stage, copied);
    end_copies();
  }
  typename Worker<T>::Sums sums = {};
  int stage = 0, free_stage = kStages - 1;
  for (int block = begin + warp_k; block < end; block += kWarpsK, copied += kWarpsK) {
    wait_for_copies<kStages - 2>();
    if constexpr (T::kHasBlocks) __syncwarp();  // scales are copied and read by different threads
    if (copied < end) worker.copy(free_stage, copied);
    end_copies();
    if constexpr (T::kHasBlocks)
      worker.multiply_scaled(stage, sums);
    else
      worker.multiply_block(stage, sums);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_for_copies<0>();
  __syncthreads();  // the ring has been read

  auto* all_sums = reinterpret_cast<float*>(shared);
  store_sums<T>(sums, all_sums, warp_n, warp_k);
  __syncthreads();
  const int count = p.m * T::kColumns;
  const auto place = [](int at) { return at / T::kColumns * T::kPitch + at % T::kColumns; };
  if (split > 1) {
    for (int at = threadIdx.x; at < count; at += T::kThreads)
      all_sums[place(at)] = sum_of_warps<T>(all_sums + place(at));
    __syncthreads();
    cluster_arrive();
    cluster_wait();
  }
  for (int at = threadIdx.x + rank * T::kThreads; at < count; at += T::kThreads * split) {
    const int row = at / T::kColumns, column = first_column + at % T::kColumns;
    if (column >= p.n) continue;
    const float* from = all_sums + place(at);
    float sum = 0.0f;
    if (split == 1) sum = sum_of_warps<T>(from);
    for (int other = 0; other < split && split > 1; ++other) sum += load_from_block(from, other);
    if constexpr (!T::kHasBlocks) {
      const float of_b = p.b_scale[column * p.b_row_stride];
      sum *= T::kIsCoded ? p.a_scale[row * p.a_row_stride] * of_b : of_b;
    }
    if (p.bias != nullptr) sum += read(p.bias, p.bias_type, column);
    write(p.d, p.out, row * p.d_leading + column, sum);
  }
  if (split > 1) {  // no block leaves while others read its sums
    __syncthreads();
    cluster_arrive();
    cluster_wait();
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads) multiply_few_rows(const __grid_constant__ Params p) {
  multiply_rows<T>(p);
}

struct RowsOfGroup {
  int group, start, end;  // -1: there is no such group, and `start` is where the last one ends
};

// The rows of the `index`-th group of a launch that has any; a whole warp asks for the same one.
__device__ inline RowsOfGroup rows_of_group(const GroupsParams& p, int index) {
  GroupLane before{};
  for (int base = 0; base < p.groups; base += 32) {
    const GroupLane entry = group_lane(p.offsets, p.groups, p.rows, base, before);
    const int group = base + threadIdx.x % 32;
    const bool is_ours = group >= p.first_group && group < p.first_group + p.count;
    unsigned holders = __ballot_sync(0xFFFFFFFFu, is_ours && entry.end > entry.start);
    if (index < __popc(holders)) {
      for (; index > 0; --index) holders &= holders - 1;
      const int lane = __ffs(holders) - 1;
      return {base + lane, __shfl_sync(0xFFFFFFFFu, entry.start, lane),
              __shfl_sync(0xFFFFFFFFu, entry.end, lane)};
    }
    index -= __popc(holders);
    before = last_lane(entry);
  }
  return {-1, before.end, before.end};
}

// Blocks along z have a group with rows each, those that are left over nothing to do; one more,
// where the launch takes the tail, writes zeros to the rows of no group.
template <typename T>
__global__ void __launch_bounds__(T::kThreads)
    multiply_few_rows_of_groups(const __grid_constant__ GroupsParams given) {
  Params p = given.product;
  const bool is_tail = given.takes_tail && blockIdx.z + 1 == gridDim.z;
  const RowsOfGroup own = rows_of_group(given, is_tail ? given.groups : blockIdx.z);
  const int bytes_of_d = p.out == ElementType::kFloat32 ? 4 : 2;
  const auto d_from = [&](int row) {
    return static_cast<std::uint8_t*>(given.product.d) + row * p.d_leading * bytes_of_d;
  };
  if (is_tail) {
    const std::int64_t count = static_cast<std::int64_t>(given.rows - own.start) * T::kColumns;
    p.d = d_from(own.start);
    for (std::int64_t at = threadIdx.x + blockIdx.y * T::kThreads; at < count;
         at += T::kThreads * gridDim.y) {
      const int column = blockIdx.x * T::kColumns + static_cast<int>(at % T::kColumns);
      if (column < p.n) write(p.d, p.out, at / T::kColumns * p.d_leading + column, 0.0f);
    }
    return;
  }
  if (own.group < 0) return;
  const int at = own.group - given.first_group;
  p.b = given.b[at], p.b_scale = given.b_scale[at], p.bias = given.bias[at];
  for (int row = own.start; row < own.end; row += T::kRows) {
    p.a = given.product.a + row * p.a_leading * T::kElement;
    p.d = d_from(row);
    p.m = min(T::kRows, own.end - row);
    multiply_rows<T>(p);
    __syncthreads();  // the sums have been read, where the next rows are copied to
  }
}

}  // namespace fp8core::few_rows
