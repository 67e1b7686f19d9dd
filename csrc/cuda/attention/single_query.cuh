// One query a sequence against all keys of a cache, whose bytes are read once for the heads of a
// group. The blocks of threads of a cluster share the keys that a query sees.
//
// A warp takes 16 keys at a time, for up to 8 heads: logits are queries times keys, with the heads
// as rows; the results are values transposed times exponentials, with the heads as columns. So a
// thread's exponentials, rounded to 16 bits, are its operand of the second product. Each warp has
// the largest logits, the sums of exponentials, which are not rounded, and the sums of values of
// its own keys; they are merged in the end, of a block, then of the cluster, always in one order.
//
// Keys and values may be in pages: a thread looks up the page of one key of a step, a step before
// it is copied. They may be codes: a warp writes the values of a step, rounded to 16 bits, beside
// the ring of codes, and goes on as if they had been stored so. Neither changes an addition.
//
// Of a mask the whole of a sequence is read first: what lies before the first key that its query
// sees, and behind the last, is not copied. Between them a thread reads the mask of one key of a
// step, a step before it is needed.
#pragma once

#include <type_traits>

#include "../cluster.cuh"
#include "../copies.cuh"
#include "../dequantize/decode.cuh"
#include "../divisor.cuh"
#include "../element.h"
#include "../mma.cuh"
#include "fp8core/attention.h"

namespace fp8core::single_query {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kHeads = 8;                   // at once
constexpr int kKeys = 16, kRows = 8;        // of a warp's step, and of a matrix of 8 x 8 elements
constexpr int kBlockStep = kWarps * kKeys;  // keys
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Params {
  SingleQueryArguments args;
  int heads, group_heads;  // of all groups, of one
  int chunks;              // of kHeads heads of a group
  float scale;             // of logits in powers of two
  int left, right;
  bool is_at_the_end;
  Divisor page_size;
  int columns;  // of the page table
};

// How keys and values are stored.
enum class Storage { kRows, kPages, kCodes };

template <typename T, int kHeadSize, Storage kStorage, bool kHasMask = false>
struct Shape {
  using Element = T;
  static constexpr bool kIsMasked = kHasMask;
  static constexpr bool kHasPages = kStorage != Storage::kRows;
  static constexpr bool kHasCodes = kStorage == Storage::kCodes;
  using Stored = std::conditional_t<kHasCodes, std::uint8_t, T>;
  static constexpr bool kIsBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kSize = kHeadSize;
  static constexpr int kPieces = kSize / 8;                       // of 16 bytes, of a key
  static constexpr int kMatrices = kKeys / kRows * kPieces;       // of keys, in a stage; of values
  static constexpr int kStageBytes = 2 * kMatrices * kRows * 16;  // of a warp, of 16 bits
  static constexpr int kStoredPieces = kSize * sizeof(Stored) / 16;  // of a key
  // Of keys and values as they are stored, then of the scales of both.
  static constexpr int kCopyBytes =
      kHasCodes ? 2 * kKeys * (kSize + static_cast<int>(sizeof(float))) : kStageBytes;
  static constexpr int kStages = kHasCodes ? 4 : 3;
  static constexpr int kRing = kStages * kCopyBytes + (kHasCodes ? kStageBytes : 0);  // of a warp
  // Of sums: the largest logits, the sums of exponentials, the sums of values.
  static constexpr int kFloats = kHeads * (2 + kSize);
  static constexpr int kRings = kWarps * kRing;
  static constexpr int kSums = (kWarps + 1) * kFloats * 4;
  static constexpr int kShared = kRings > kSums ? kRings : kSums;
};

// Where a piece of a key lies in a stage: eight pieces of a key in 128 bytes, which a copy fills at
// once, in an order in which those of eight keys do not share banks.
template <typename S>
__device__ int place(int tile, int piece, int row) {
  return ((piece / 8 * kKeys + tile * kRows + row) * 8 + (piece % 8 ^ row)) * 16;
}

// What exponentials relative to `from` are multiplied by to be relative to `to`, in powers of two;
// 0 where there are none.
__device__ inline float rescale(float from, float to) {
  return from == -INFINITY ? 0.0f : exp2f(from - to);
}

// Two values as 16 bits each, the first in the low half.
template <typename T>
__device__ std::uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

// The sums of a warp. Thread t: of head t / 4 the largest logit, and the sum of exponentials of the
// keys whose logits it has; of heads 2 (t % 4) and 2 (t % 4) + 1 elements of the values.
template <typename S>
struct Sums {
  float largest = -INFINITY, sum = 0.0f;
  float values[S::kSize / 16][4] = {};

  // Adds a stage of keys and values, those whose bits are set in `seen`.
  __device__ void add(const std::uint8_t* stage, const std::uint32_t (&q)[S::kSize / 16][4],
                      float scale, std::uint32_t seen) {
    using T = typename S::Element;
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    float logits[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < S::kPieces / 4; ++i) {
        std::uint32_t words[4];
        load_matrices(words, stage + place<S>(tile, 4 * i + lane / kRows, lane % kRows));
        multiply<S::kIsBFloat16>(logits[tile], q[2 * i], {words[0], words[1]});
        multiply<S::kIsBFloat16>(logits[tile], q[2 * i + 1], {words[2], words[3]});
      }
    float most = largest;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_seen = seen >> (tile * kRows + 2 * quarter + i) & 1;
        logits[tile][i] = is_seen ? logits[tile][i] * scale : -INFINITY;
        most = fmaxf(most, logits[tile][i]);
      }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
    const float factor = rescale(largest, most);
    largest = most, sum *= factor;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        logits[tile][i] = rescale(logits[tile][i], most);
        sum += logits[tile][i];
      }
    const std::uint32_t weights[2] = {pack<T>(logits[0][0], logits[0][1]),
                                      pack<T>(logits[1][0], logits[1][1])};
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      factors[i] = __shfl_sync(0xFFFFFFFFu, factor, 4 * (2 * quarter + i));
    const int matrix = lane / 8;  // of four: the next piece in 1 and 3, the next keys in 2 and 3
    const std::uint8_t* v = stage + S::kStageBytes / 2;
#pragma unroll
    for (int i = 0; i < S::kSize / 16; ++i) {
      std::uint32_t words[4];
      load_transposed(words, v + place<S>(matrix / 2, 2 * i + matrix % 2, lane % kRows));
#pragma unroll
      for (int at = 0; at < 4; ++at) values[i][at] *= factors[at % 2];
      multiply<S::kIsBFloat16>(values[i], words, weights);
    }
  }

  // Writes [kHeads] largest, [kHeads] sums, [kHeads, kSize] values.
  __device__ void store(float* to) {
    const int lane = threadIdx.x % 32, head = lane / 4, quarter = lane % 4;
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    if (quarter == 0) to[head] = largest, to[kHeads + head] = sum;
#pragma unroll
    for (int i = 0; i < S::kSize / 16; ++i)
#pragma unroll
      for (int at = 0; at < 4; ++at)
        to[2 * kHeads + (2 * quarter + at % 2) * S::kSize + 16 * i + at / 2 * 8 + head] =
            values[i][at];
  }
};

// The largest logit, the sum and one value of head `head` of `count` sums; `load` is given the
// number of one and a position in it.
struct Merged {
  float largest = -INFINITY, sum = 0.0f, value = 0.0f;
};
template <typename S, typename Load>
__device__ Merged merged(int count, int head, int element, const Load& load) {
  Merged to;
#pragma unroll 4
  for (int i = 0; i < count; ++i) to.largest = fmaxf(to.largest, load(i, head));
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float factor = rescale(load(i, head), to.largest);
    to.sum += factor * load(i, kHeads + head);
    to.value += factor * load(i, 2 * kHeads + head * S::kSize + element);
  }
  return to;
}

// The keys that the query of a sequence sees: none if it is not there.
struct Seen {
  int begin = 0, end = 0;
};

// From the first to the last key that a mask leaves. All threads of a block call this.
__device__ inline Seen unmasked_keys(const std::uint8_t* mask, int capacity) {
  __shared__ int firsts[kWarps], ends[kWarps];
  int first = capacity, end = 0;
  const auto look = [&](int key, std::uint32_t bytes) {  // of four keys
    const std::uint32_t seen = __vcmpeq4(bytes, 0u);
    if (seen == 0) return;
    first = min(first, key + (__ffs(static_cast<int>(seen)) - 1) / 8);
    end = max(end, key + 4 - __clz(static_cast<int>(seen)) / 8);
  };
  constexpr int kVector = 16;  // bytes that a thread reads at once, at a multiple of them
  const auto misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(mask) % kVector);
  const int before = min(capacity, (kVector - misaligned) % kVector);
  const int vectors = (capacity - before) / kVector, behind = before + vectors * kVector;
  const int thread = threadIdx.x;
  const int alone = thread < kVector ? thread : behind + thread - kVector;
  if (thread < kVector ? alone < before : thread < 2 * kVector && alone < capacity)
    look(alone, 0xFFFFFF00u | mask[alone]);
#pragma unroll 4
  for (int i = thread; i < vectors; i += kThreads) {
    const int key = before + i * kVector;
    const uint4 bytes = *reinterpret_cast<const uint4*>(mask + key);
    look(key, bytes.x), look(key + 4, bytes.y), look(key + 8, bytes.z), look(key + 12, bytes.w);
  }
  first = __reduce_min_sync(0xFFFFFFFFu, first), end = __reduce_max_sync(0xFFFFFFFFu, end);
  if (thread % 32 == 0) firsts[thread / 32] = first, ends[thread / 32] = end;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp)
    first = min(first, firsts[warp]), end = max(end, ends[warp]);
  return {first, max(first, end)};
}

template <typename S>
__device__ Seen seen_keys(const Params& p, int sequence) {
  const SingleQueryArguments& a = p.args;
  const int capacity = static_cast<int>(a.capacity);
  if constexpr (S::kIsMasked) {
    return unmasked_keys(a.mask + sequence * a.mask_stride, capacity);
  }
  const auto length = [&](const std::int32_t* edges, std::int64_t most) {
    const std::int64_t size = std::int64_t{edges[sequence + 1]} - edges[sequence];
    return static_cast<int>(min(max(size, std::int64_t{0}), most));
  };
  Seen seen{0, capacity};
  if (a.cu_seqlens_q != nullptr) {
    if (length(a.cu_seqlens_q, 1) == 0) return {};
    seen.end = length(a.cu_seqlens_kv, a.capacity);
  }
  const int position = p.is_at_the_end ? seen.end - 1 : 0;
  if (p.left >= 0) seen.begin = max(seen.begin, position - p.left);
  if (p.right >= 0)
    seen.end = static_cast<int>(min(std::int64_t{seen.end}, std::int64_t{position} + p.right + 1));
  return seen;
}

// Where the key `key + lane % kKeys` of a sequence lies; in page -1 there is none.
struct Slot {
  int page = -1, row = 0;
};
template <typename S>
__device__ Slot slot_of(const Params& p, int sequence, int key, int end) {
  Slot slot;
  if constexpr (S::kHasPages) {
    const int at = key + threadIdx.x % kKeys;
    if (at >= end) return slot;
    const std::uint32_t column = p.page_size.quotient(at);
    slot.row = p.page_size.remainder(at, column);
    slot.page = p.args.page_table[std::int64_t{sequence} * p.columns + column];
    if (slot.page < 0 || slot.page >= p.args.pages) slot.page = -1;
  }
  return slot;
}

// Begins to copy the rows of 16 keys, those before `end`, zeros of others and of pages that are
// none. Adjacent threads copy adjacent pieces of a row.
template <typename S>
__device__ void copy_rows(std::uint8_t* to, const typename S::Stored* from, const HeadRows& rows,
                          Slot slot, int key, int end) {
  const int lane = threadIdx.x % 32, piece = lane % S::kStoredPieces;
  constexpr int kAtOnce = 32 / S::kStoredPieces;  // rows
#pragma unroll
  for (int i = 0; i < kKeys / kAtOnce; ++i) {
    const int at = i * kAtOnce + lane / S::kStoredPieces;
    bool is_wanted = key + at < end;
    std::int64_t row = (key + at) * rows.row_stride;
    if constexpr (S::kHasPages) {
      const int page = __shfl_sync(0xFFFFFFFFu, slot.page, at);
      row = __shfl_sync(0xFFFFFFFFu, slot.row, at) * rows.row_stride;
      is_wanted = page >= 0;
      if (is_wanted) row += page * rows.batch_stride;
    }
    const int within = S::kHasCodes ? (at * S::kStoredPieces + piece) * 16
                                    : place<S>(at / kRows, piece, at % kRows);
    copy_16_bytes(to + within, from + row + piece * (16 / sizeof(typename S::Stored)), is_wanted);
  }
}

// Begins to copy the scales of 16 keys, and behind them those of their values.
__device__ inline void copy_scales(float* to, const HeadRows& k, const HeadRows& v, int group,
                                   Slot slot) {
  const int lane = threadIdx.x % 32;
  const HeadRows& rows = lane < kKeys ? k : v;
  const std::int64_t row =
      slot.page < 0
          ? 0
          : slot.page * rows.batch_stride + slot.row * rows.row_stride + group * rows.head_stride;
  copy_float(to + lane, static_cast<const float*>(rows.data) + row, slot.page >= 0);
}

// Writes the values of a stage of codes as a stage of 16 bits.
template <typename S>
__device__ void decode_stage(std::uint8_t* to, const std::uint8_t* stage) {
  using T = typename S::Element;
  const auto* scales = reinterpret_cast<const float*>(stage + 2 * kKeys * S::kSize);
#pragma unroll 4
  for (int unit = threadIdx.x % 32; unit < 2 * kKeys * S::kStoredPieces; unit += 32) {
    const int row = unit / S::kStoredPieces, piece = unit % S::kStoredPieces;
    const int key = row % kKeys;
    const uint4 codes = *reinterpret_cast<const uint4*>(stage + unit * 16);
    const float scale = scales[row];
    const auto values = [&](std::uint32_t pair) {
      const float2 x = decode2<ElementType::kE4M3>(pair);
      return pack<T>(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale));
    };
    std::uint8_t* rows = to + row / kKeys * (S::kStageBytes / 2);
    const auto write = [&](int half, std::uint32_t first, std::uint32_t second) {
      *reinterpret_cast<uint4*>(rows + place<S>(key / kRows, 2 * piece + half, key % kRows)) =
          make_uint4(values(first), values(first >> 16), values(second), values(second >> 16));
    };
    write(0, codes.x, codes.y);
    write(1, codes.z, codes.w);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads) attend_once(const __grid_constant__ Params p) {
  using T = typename S::Element;
  extern __shared__ __align__(16) std::uint8_t shared[];
  const SingleQueryArguments& a = p.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blocks_of_split(), rank = blockIdx.y;
  const int chunk = blockIdx.x % p.chunks, groups = p.heads / p.group_heads;
  const int group = blockIdx.x / p.chunks % groups;
  const int sequence = blockIdx.x / p.chunks / groups;
  const int first_head = group * p.group_heads + chunk * kHeads;
  const int count = min(kHeads, p.group_heads - chunk * kHeads);  // of heads

  // The row of q and of out; -1 for a sequence that has none.
  const Seen seen = seen_keys<S>(p, sequence);
  std::int64_t row = sequence;
  if (a.starts != nullptr) {
    row = a.starts[sequence];
    const bool is_there = a.cu_seqlens_q[sequence + 1] > a.cu_seqlens_q[sequence];
    if (!is_there || row < 0 || row >= a.rows) row = -1;
  }

  // This block has the keys from `begin` to `end`, in whole steps of its warps.
  const int steps = (max(seen.end - seen.begin, 0) + kBlockStep - 1) / kBlockStep;
  const auto step_of = [&](int at) {
    return seen.begin + static_cast<int>(std::int64_t{steps} * at / split) * kBlockStep;
  };
  const int end = min(seen.end, step_of(rank + 1));
  using Stored = typename S::Stored;
  constexpr int kStages = S::kStages;
  const auto rows_of = [&](const HeadRows& rows) {
    return static_cast<const Stored*>(rows.data) +
           (S::kHasPages ? 0 : sequence * rows.batch_stride) + group * rows.head_stride;
  };
  const Stored *k = rows_of(a.k), *v = rows_of(a.v);
  std::uint8_t* ring = shared + warp * S::kRing;
  int key = step_of(rank) + warp * kKeys, copied = key;
  Slot slot = slot_of<S>(p, sequence, copied, end);
  const auto copy_next = [&](int stage) {
    if (copied < end) {
      std::uint8_t* to = ring + stage * S::kCopyBytes;
      constexpr int kValues = kKeys * S::kSize * sizeof(Stored);  // bytes before them
      copy_rows<S>(to, k, a.k, slot, copied, end);
      copy_rows<S>(to + kValues, v, a.v, slot, copied, end);
      if constexpr (S::kHasCodes)
        copy_scales(reinterpret_cast<float*>(to + 2 * kValues), a.k_scales, a.v_scales, group,
                    slot);
    }
    end_copies();
    copied += kBlockStep;
    slot = slot_of<S>(p, sequence, copied, end);
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_next(stage);
  std::uint32_t q[S::kSize / 16][4] = {};  // of heads beyond the last zeros
  if (lane / 4 < count && row >= 0) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(
        static_cast<const T*>(a.q.data) + row * a.q.batch_stride +
        (first_head + lane / 4) * a.q.head_stride + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < S::kSize / 16; ++i) q[i][0] = words[8 * i], q[i][2] = words[8 * i + 4];
  }
  Sums<S> own;
  const auto excludes = [&](int first) -> std::uint32_t {  // compared when it is needed
    const int at = first + lane % kKeys;
    return at < end ? a.mask[sequence * a.mask_stride + at] : 1u;
  };
  std::uint32_t is_excluded = 0;
  if constexpr (S::kIsMasked) is_excluded = excludes(key);
  const auto seen_of_step = [&]() -> std::uint32_t {  // a bit a key
    if constexpr (S::kIsMasked) {
      const std::uint32_t bits = __ballot_sync(0xFFFFFFFFu, is_excluded == 0);
      is_excluded = excludes(key + kBlockStep);
      return bits;
    } else {
      return 0xFFFFu >> max(0, kKeys - (end - key));
    }
  };
  int stage = 0, free_stage = kStages - 1;
  for (; key < end; key += kBlockStep) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // of all threads; and what is copied over has been read
    copy_next(free_stage);
    const std::uint8_t* rows = ring + stage * S::kCopyBytes;
    if constexpr (S::kHasCodes) {
      std::uint8_t* decoded = ring + kStages * S::kCopyBytes;
      decode_stage<S>(decoded, rows);
      __syncwarp();
      rows = decoded;
    }
    own.add(rows, q, p.scale, seen_of_step());
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_for_copies<0>();
  __syncthreads();  // the rings have been read

  auto* of_block = reinterpret_cast<float*>(shared);
  float* of_warps = of_block + S::kFloats;
  own.store(of_warps + warp * S::kFloats);
  __syncthreads();
  for (int at = threadIdx.x; at < count * S::kSize; at += kThreads) {
    const int head = at / S::kSize;
    const Merged sums = merged<S>(kWarps, head, at % S::kSize, [&](int i, int place) {
      return of_warps[i * S::kFloats + place];
    });
    if (at % S::kSize == 0) of_block[head] = sums.largest, of_block[kHeads + head] = sums.sum;
    of_block[2 * kHeads + at] = sums.value;
  }
  __syncthreads();
  if (split > 1) cluster_arrive(), cluster_wait();
  for (int at = threadIdx.x + rank * kThreads; at < count * S::kSize && row >= 0;
       at += kThreads * split) {
    const int head = at / S::kSize;
    const Merged sums = merged<S>(split, head, at % S::kSize, [&](int i, int place) {
      return split > 1 ? load_from_block(of_block + place, i) : of_block[place];
    });
    const std::int64_t to = row * p.heads + first_head + head;
    static_cast<T*>(a.out)[to * S::kSize + at % S::kSize] =
        static_cast<T>(sums.sum > 0.0f ? sums.value / sums.sum : sums.sum);
    if (at % S::kSize == 0) a.stats[to] = (sums.largest + log2f(sums.sum)) * kLn2;
  }
  if (split > 1) {  // no block leaves while others read its sums
    __syncthreads();
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace fp8core::single_query
