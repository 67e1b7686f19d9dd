// One kernel for the rotary embedding and its transposed map.
//
// A block works on a few adjacent tokens and all of their heads, so that the sine and the cosine of
// an angle are computed once for all heads. They are kept in shared memory as the coefficients of
// each pair (x, z), which is all that tells the two maps apart:
//
//     y of x = x * coefficients.x + z * coefficients.z
//     y of z = z * coefficients.y + x * coefficients.w
//
//                  x          y          z           w
//     rotary       cos(of x)  cos(of z)  -sin(of x)   sin(of z)
//     transposed   cos(of x)  cos(of z)   sin(of z)  -sin(of x)
//
// A unit of work is a column of a head: some pairs, or elements behind the pairs that are copied.
// With keys and values a token has the heads of three tensors, and all columns of values are
// copied. Heads with more columns than the shared memory takes are cut into parts, each in blocks
// of its own.
#include "rotary.h"

#include <algorithm>

#include "../divisor.cuh"
#include "../element.h"
#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"

namespace fp8core {
namespace {

constexpr int kThreads = 256;
constexpr int kMostPairs = 512;   // of a block
constexpr int kMostTokens = 128;  // of a block
constexpr int kNoAngle = -1, kNoToken = -2;

// Blocks of a multiprocessor: 40 KiB of x are on their way, and 48 KiB in float32, without spills.
template <typename T>
constexpr int kBlocks = sizeof(T) == 4 ? 3 : 5;

struct Params {
  HeadsView x, keys, values;
  void* y = nullptr;
  const float* freqs = nullptr;
  const int32_t *starts = nullptr, *cu_seqlens = nullptr;
  int64_t tokens = 0, positions = 0, rotated = 0;
  int num_bounds = 0;  // entries of cu_seqlens
  bool is_inverse = false, sequence_is_inner = false;
  uint32_t tokens_per_block = 1, parts = 1;
  int64_t rotated_columns = 0, columns = 0;  // of a head
  Divisor inner{1}, heads{1}, part_columns{1};
  uint32_t num_heads = 1, turned_heads = 1, columns_per_part = 1;
};

// How many entries are at most `token`, of entries that rise. A whole warp asks for the same token,
// and narrows the range that holds the end of them to a thirty-second at a time.
__device__ int count_up_to(const int32_t* bounds, int size, int64_t token) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = size;  // entries before low are at most `token`, those from high on are not
  while (high - low > 32) {
    const int step = (high - low + 31) / 32, at = low + (lane + 1) * step - 1;
    const bool is_before = at < high && bounds[at] <= token;
    const int count = __popc(__ballot_sync(0xFFFFFFFFu, is_before));
    low += count * step;
    if (low + step - 1 < high) high = low + step - 1;
  }
  const bool is_before = low + lane < high && bounds[low + lane] <= token;
  return low + __popc(__ballot_sync(0xFFFFFFFFu, is_before));
}

// The row of freqs for a token, kNoAngle or kNoToken; for a whole warp.
__device__ int row_of(const Params& p, int64_t token) {
  int64_t position;
  int sequence;
  if (p.cu_seqlens != nullptr) {
    sequence = count_up_to(p.cu_seqlens, p.num_bounds, token) - 1;
    if (sequence < 0 || sequence >= p.num_bounds - 1) return kNoToken;
    position = token - p.cu_seqlens[sequence];
  } else {
    const uint32_t at = static_cast<uint32_t>(token), outer = p.inner.quotient(at),
                   inner = p.inner.remainder(at, outer);
    position = p.sequence_is_inner ? inner : outer;
    sequence = static_cast<int>(p.sequence_is_inner ? outer : inner);
  }
  if (p.starts != nullptr) position += p.starts[sequence];
  const bool is_known = position >= 0 && position < p.positions;
  return is_known ? static_cast<int>(position) : kNoAngle;
}

// One pair a column, or one element that is copied; any strides and sizes.
template <typename T, bool kInterleaved>
struct Elements {
  static constexpr int kPairs = 1, kCopied = 1;
  T first, second;

  static __device__ int64_t element(int64_t column, int, bool is_second, int64_t rotated) {
    return kInterleaved ? 2 * column + is_second : column + (is_second ? rotated / 2 : 0);
  }
  __device__ void load_pairs(const Params& p, const T* head, int64_t column, int64_t stride) {
    first = head[element(column, 0, false, p.rotated) * stride];
    second = head[element(column, 0, true, p.rotated) * stride];
  }
  __device__ void load_copied(const T* head, int64_t at, int64_t stride) {
    first = head[at * stride];
  }
  __device__ void store_copied(T* to) const { *to = first; }
  __device__ void store_pairs(const Params& p, T* head, int64_t column) const {
    head[element(column, 0, false, p.rotated)] = first;
    head[element(column, 0, true, p.rotated)] = second;
  }
  __device__ void clear() { first = second = static_cast<T>(0.0f); }
  __device__ void turn_and_store(const Params& p, T* head, int64_t column, const float4* angles,
                                 uint32_t) const;
};

// Eight pairs a column, or eight elements that are copied; as vectors of 16 bytes. The elements of
// the pairs are two vectors, one in each half of what is rotated; interleaved, each of them holds
// four pairs.
template <typename T, bool kInterleaved>
struct Vectors {
  static constexpr int kPairs = 8, kCopied = 8;
  Eight<T> first, second;

  static __device__ int64_t element(int64_t column, int pair, bool is_second, int64_t rotated) {
    const int64_t half = rotated / 2, at = column * 8;
    if (kInterleaved) return at + (pair / 4) * half + pair % 4 * 2 + is_second;
    return at + pair + (is_second ? half : 0);
  }
  __device__ void load_pairs(const Params& p, const T* head, int64_t column, int64_t) {
    first.load_in_order(head + column * 8);
    second.load_in_order(head + column * 8 + p.rotated / 2);
  }
  __device__ void load_copied(const T* head, int64_t at, int64_t) {
    first.load_in_order(head + at);
  }
  __device__ void store_copied(T* to) const { first.store(to); }
  __device__ void store_pairs(const Params& p, T* head, int64_t column) const {
    first.store(head + column * 8);
    second.store(head + column * 8 + p.rotated / 2);
  }
  __device__ void clear() {
    first.gather(nullptr, 0);
    second.gather(nullptr, 0);
  }
  __device__ void turn_and_store(const Params& p, T* head, int64_t column, const float4* angles,
                                 uint32_t stride) const;
};

// Each product is rounded before the sum, as torch's operators do.
__device__ inline float turned(float x, float by, float z, float by_z) {
  return __fadd_rn(__fmul_rn(x, by), __fmul_rn(z, by_z));
}

template <typename T, bool kInterleaved>
__device__ void Elements<T, kInterleaved>::turn_and_store(const Params& p, T* head, int64_t column,
                                                          const float4* angles, uint32_t) const {
  const float4 by = *angles;
  const float x = static_cast<float>(first), z = static_cast<float>(second);
  head[element(column, 0, false, p.rotated)] = static_cast<T>(turned(x, by.x, z, by.z));
  head[element(column, 0, true, p.rotated)] = static_cast<T>(turned(z, by.y, x, by.w));
}

template <typename T, bool kInterleaved>
__device__ void Vectors<T, kInterleaved>::turn_and_store(const Params& p, T* head, int64_t column,
                                                         const float4* angles,
                                                         uint32_t stride) const {
  float y[8], other[8];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const float4 by = angles[pair * stride];
    if constexpr (kInterleaved) {
      const Eight<T>& from = pair < 4 ? first : second;
      const int at = pair % 4 * 2;
      const float x = from[at], z = from[at + 1];
      (pair < 4 ? y : other)[at] = turned(x, by.x, z, by.z);
      (pair < 4 ? y : other)[at + 1] = turned(z, by.y, x, by.w);
    } else {
      const float x = first[pair], z = second[pair];
      y[pair] = turned(x, by.x, z, by.z);
      other[pair] = turned(z, by.y, x, by.w);
    }
  }
  T* to = head + column * 8;
  rounded<T>(y).store(to);
  rounded<T>(other).store(to + p.rotated / 2);
}

// Of a unit: its token among those of the block, its head, and its column.
struct Coordinates {
  uint32_t token, head, local;  // local: the column in the block's part of a head
  int64_t column;

  __device__ Coordinates(const Params& p, uint32_t unit, int64_t first_column) {
    const uint32_t row = p.part_columns.quotient(unit);
    local = p.part_columns.remainder(unit, row);
    token = p.heads.quotient(row);
    head = p.heads.remainder(row, token);
    column = first_column + local;
  }
};

template <typename T, typename Unit>
__device__ void load_from(const Params& p, const HeadsView& x, const Coordinates& at,
                          uint32_t first_head, int64_t first_token, Unit& unit) {
  const uint32_t token = static_cast<uint32_t>(first_token + at.token),
                 outer = p.inner.quotient(token), inner = p.inner.remainder(token, outer);
  const T* head = static_cast<const T*>(x.data) + outer * x.outer_stride + inner * x.inner_stride +
                  (at.head - first_head) * x.head_stride;
  if (at.column < p.rotated_columns)
    unit.load_pairs(p, head, at.column, x.element_stride);
  else
    unit.load_copied(head, p.rotated + (at.column - p.rotated_columns) * Unit::kCopied,
                     x.element_stride);
}

template <typename T, bool kParts, typename Unit>
__device__ void load(const Params& p, const Coordinates& at, int64_t first_token, Unit& unit) {
  if (at.column >= p.columns) return;
  if (kParts && at.head >= p.turned_heads)
    load_from<T>(p, p.values, at, p.turned_heads, first_token, unit);
  else if (kParts && at.head >= p.x.heads)
    load_from<T>(p, p.keys, at, static_cast<uint32_t>(p.x.heads), first_token, unit);
  else
    load_from<T>(p, p.x, at, 0, first_token, unit);
}

// The coefficients of pair `pair` of the local column `local` of a token. Adjacent columns are
// adjacent, so that a warp's reads lie in different banks.
template <int kPairs>
__device__ uint32_t entry(const Params& p, uint32_t token, uint32_t pair, uint32_t local) {
  return (token * kPairs + pair) * p.columns_per_part + local;
}

// Computes the coefficients of the block's tokens: an angle a thread, adjacent angles in adjacent
// threads.
template <typename Unit>
__device__ void tabulate(const Params& p, const int* rows, uint32_t tokens, int64_t first_column,
                         float4* table) {
  constexpr uint32_t kPairs = Unit::kPairs;
  const uint32_t angles = tokens * 2 * p.columns_per_part * kPairs;
  for (uint32_t i = threadIdx.x; i < angles; i += kThreads) {
    const uint32_t pair = i % kPairs, row = i / kPairs, rest = p.part_columns.quotient(row),
                   local = p.part_columns.remainder(row, rest), token = rest / 2;
    const bool is_second = rest % 2 != 0;
    const int64_t column = first_column + local;
    if (column >= p.rotated_columns) continue;
    const int position = rows[token];
    // Of NaN the sine and the cosine are NaN; the elements of no token are 0, whatever the angle.
    float angle = position == kNoAngle ? __int_as_float(0x7FFFFFFF) : 0.0f;
    if (position >= 0)
      angle = __ldg(p.freqs + position * p.rotated +
                    Unit::element(column, static_cast<int>(pair), is_second, p.rotated));
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    float* to = reinterpret_cast<float*>(table + entry<kPairs>(p, token, pair, local));
    to[is_second] = cosine;
    to[2 + (is_second != p.is_inverse)] = is_second ? sine : -sine;
  }
}

template <typename T, bool kParts, typename Unit>
__device__ void store(const Params& p, const Coordinates& at, int64_t first_token,
                      const float4* table, const Unit& unit) {
  if (at.column >= p.columns) return;
  const int64_t row = (first_token + at.token) * p.num_heads + at.head;
  T* head = static_cast<T*>(p.y) + row * p.x.head_size;
  if (kParts && at.head >= p.turned_heads && at.column < p.rotated_columns)
    unit.store_pairs(p, head, at.column);
  else if (at.column < p.rotated_columns)
    unit.turn_and_store(p, head, at.column, table + entry<Unit::kPairs>(p, at.token, 0, at.local),
                        p.columns_per_part);
  else
    unit.store_copied(head + p.rotated + (at.column - p.rotated_columns) * Unit::kCopied);
}

// The first unit of each thread is read before the angles, for which the block waits.
template <typename T, bool kParts, typename Unit>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    rotate_heads(const __grid_constant__ Params p) {
  __shared__ float4 table[kMostPairs];
  __shared__ int rows[kMostTokens];
  const uint32_t group = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int64_t first_token = static_cast<int64_t>(group) * p.tokens_per_block;
  const int64_t first_column = static_cast<int64_t>(part) * p.columns_per_part;
  const int64_t left = p.tokens - first_token;
  const uint32_t tokens =
      left < p.tokens_per_block ? static_cast<uint32_t>(left) : p.tokens_per_block;
  const uint32_t units = tokens * p.num_heads * p.columns_per_part;
  Unit unit;
  if (threadIdx.x < units)
    load<T, kParts>(p, Coordinates(p, threadIdx.x, first_column), first_token, unit);
  for (uint32_t token = threadIdx.x / 32; token < tokens; token += kThreads / 32) {
    const int row = row_of(p, first_token + token);
    if (threadIdx.x % 32 == 0) rows[token] = row;
  }
  __syncthreads();
  tabulate<Unit>(p, rows, tokens, first_column, table);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < units; i += kThreads) {
    const Coordinates at(p, i, first_column);
    if (i >= kThreads) load<T, kParts>(p, at, first_token, unit);
    if (rows[at.token] == kNoToken && (!kParts || at.head < p.turned_heads))
      unit.clear();  // and so is what it is turned to
    store<T, kParts>(p, at, first_token, table, unit);
  }
}

template <typename Unit>
void plan(Params& p) {
  const int64_t rest = p.x.head_size - p.rotated;
  p.rotated_columns = p.rotated / 2 / Unit::kPairs;
  p.columns = p.rotated_columns + rest / Unit::kCopied;
  constexpr int64_t kMostColumns = kMostPairs / Unit::kPairs;
  const int64_t parts = (p.columns + kMostColumns - 1) / kMostColumns;
  const int64_t per_part = (p.columns + parts - 1) / parts;
  const int64_t per_token = per_part * p.num_heads;
  int64_t tokens = (kThreads + per_token - 1) / per_token;
  tokens = std::min({tokens, kMostColumns / per_part, int64_t{kMostTokens}, p.tokens});
  p.tokens_per_block = static_cast<uint32_t>(tokens);
  p.parts = static_cast<uint32_t>(parts);
  p.columns_per_part = static_cast<uint32_t>(per_part);
  p.part_columns = Divisor(p.columns_per_part);
}

template <typename T, typename Unit>
void launch(Params& p, cudaStream_t stream) {
  plan<Unit>(p);
  const int64_t groups = (p.tokens + p.tokens_per_block - 1) / p.tokens_per_block;
  const int64_t blocks = groups * p.parts;
  FP8CORE_CHECK(blocks < (int64_t{1} << 31), "rotary: ", p.tokens, " tokens with heads of ",
                p.x.head_size, " elements, more than a grid takes");
  if (p.values.heads > 0)
    rotate_heads<T, true, Unit><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  else
    rotate_heads<T, false, Unit><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  FP8CORE_CUDA(cudaGetLastError());
}

// Whether all vectors of eight elements that a head consists of begin at multiples of 16 bytes, and
// each half of what is rotated is whole vectors.
bool has_vectors(const Params& p, int64_t element_bytes) {
  const auto is_whole = [&](int64_t size, int64_t stride) {
    return size == 1 || stride * element_bytes % 16 == 0;
  };
  const auto begins_whole = [&](const HeadsView& x) {
    return x.heads == 0 ||
           (x.element_stride == 1 && is_aligned(x.data, 16) && is_whole(x.outer, x.outer_stride) &&
            is_whole(x.inner, x.inner_stride) && is_whole(x.heads, x.head_stride));
  };
  return p.rotated % 16 == 0 && p.x.head_size % 8 == 0 && is_aligned(p.y, 16) &&
         begins_whole(p.x) && begins_whole(p.keys) && begins_whole(p.values);
}

template <typename T, bool kInterleaved>
void launch(Params& p, cudaStream_t stream) {
  if (has_vectors(p, sizeof(T)))
    launch<T, Vectors<T, kInterleaved>>(p, stream);
  else
    launch<T, Elements<T, kInterleaved>>(p, stream);
}

}  // namespace

void launch_rotary(const RotaryDesc& desc, const RotaryArguments& arguments, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  Params p;
  p.x = arguments.x;
  p.keys = arguments.keys;
  p.values = arguments.values;
  p.y = arguments.y;
  p.freqs = arguments.freqs;
  p.starts = arguments.starts;
  p.cu_seqlens = arguments.cu_seqlens;
  p.num_bounds = static_cast<int>(arguments.sequences + 1);
  p.tokens = p.x.outer * p.x.inner;
  p.positions = arguments.positions;
  p.rotated = arguments.rotated;
  p.is_inverse = desc.is_inverse;
  p.sequence_is_inner = desc.layout == RotaryLayout::kBshd;
  p.inner = Divisor(static_cast<uint32_t>(p.x.inner));
  p.turned_heads = static_cast<uint32_t>(p.x.heads + p.keys.heads);
  p.num_heads = p.turned_heads + static_cast<uint32_t>(p.values.heads);
  p.heads = Divisor(p.num_heads);
  with_type(desc.input, [&](auto input) {
    using T = ElementOf<input()>;
    if (desc.is_interleaved)
      launch<T, true>(p, stream);
    else
      launch<T, false>(p, stream);
  });
}

}  // namespace fp8core
