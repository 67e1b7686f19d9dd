// Rows sent along a route. A warp works on a token and all of its rows, or on a part of their
// columns, so that what all of them share is read once; warps behind those of the tokens fill the
// rows that no token writes.
#include <cuda_bf16.h>

#include <algorithm>

#include "../element.h"
#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"
#include "permutation.h"

namespace fp8core {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kAtOnce = 4;     // rows of a token of which a warp takes products at once
constexpr int kStep = 32 * 8;  // columns of a row that a warp reads with one instruction
constexpr int kPair = 2;       // rows of a token that a warp adds at once

// How many steps of columns a warp reads before it waits for the first: what is under way has to
// cover the latency of the memory, in the registers that leave a multiprocessor four blocks.
template <typename T>
constexpr int kSteps = sizeof(T) == 4 ? 1 : 2;

// Eight columns of a row; as vectors they are adjacent.
template <typename T, bool kVectors>
struct Columns {
  Eight<T> eight;
  __device__ float operator[](int i) const { return eight[i]; }
  __device__ void load(const T* row, int64_t column, int64_t cols) {
    if constexpr (kVectors)
      eight.load_kept(row + column);
    else
      eight.gather(row + column, static_cast<int>(min(cols - column, int64_t{8})));
  }
  __device__ void clear() { eight.gather(nullptr, 0); }
  __device__ void store(T* row, int64_t column, int64_t cols) const {
    if constexpr (kVectors) {
      eight.store(row + column);
    } else {
      const int count = static_cast<int>(min(cols - column, int64_t{8}));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < count) row[column + i] = element(i);
    }
  }
  __device__ T element(int i) const {
    if constexpr (sizeof(T) == 4) {
      return eight[i];
    } else {
      const uint16_t bits = static_cast<uint16_t>(eight.word(i / 2) >> (i % 2 * 16));
      return *reinterpret_cast<const T*>(&bits);
    }
  }
};

// A float of weights, or of anything else in one of the three types.
__device__ float load_float(const void* from, InputType type, int64_t at) {
  switch (type) {
    case InputType::kFloat32: return __ldg(static_cast<const float*>(from) + at);
    case InputType::kBFloat16:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(from)[at]);
    default: return static_cast<float>(static_cast<const __half*>(from)[at]);
  }
}

// The bits of an element of 2, 4 or 8 bytes.
__device__ unsigned long long load_bits(const void* from, int bytes, int64_t at) {
  switch (bytes) {
    case 2: return static_cast<const uint16_t*>(from)[at];
    case 4: return static_cast<const uint32_t*>(from)[at];
    default: return static_cast<const unsigned long long*>(from)[at];
  }
}

__device__ void store_bits(void* to, int bytes, int64_t at, unsigned long long bits) {
  switch (bytes) {
    case 2: static_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(bits); return;
    case 4: static_cast<uint32_t*>(to)[at] = static_cast<uint32_t>(bits); return;
    default: static_cast<unsigned long long*>(to)[at] = bits;
  }
}

__device__ bool is_zero(unsigned long long bits, int bytes) {  // 0 or -0
  return (bits & ~(1ull << (bytes * 8 - 1))) == 0;
}

// A row of a token: its number, its slot, and two words of whoever lists it.
struct RowOfToken {
  int row, slot, bits, kind;
};

// Lists a token's rows in the order of their slots, calls missing(slot) for each slot without a
// row, and returns the number of rows. A whole warp calls it, with a list of `slots` of its own.
template <typename Missing>
__device__ int list_rows(const int32_t* index, int slots, int64_t rows, RowOfToken* list,
                         const Missing& missing) {
  constexpr int kReads = 4;  // of a lane, before it waits for the first
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int base = 0; base < slots; base += 32 * kReads) {
    int row[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int slot = base + i * 32 + lane;
      row[i] = slot < slots ? __ldg(index + slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int slot = base + i * 32 + lane;
      const bool is_row = row[i] >= 0 && row[i] < rows;
      const unsigned listed = __ballot_sync(0xFFFFFFFFu, is_row);
      if (is_row)
        list[total + __popc(listed & ((1u << lane) - 1u))] = {row[i], slot, 0, 0};
      else if (slot < slots)
        missing(slot);
      total += __popc(listed);
    }
  }
  __syncwarp();
  return total;
}

// Calls complete(row) for each of the rows, a lane for each. A whole warp calls it.
template <typename Complete>
__device__ void complete_rows(RowOfToken* list, int count, const Complete& complete) {
  for (int i = threadIdx.x % 32; i < count; i += 32) complete(list[i]);
  __syncwarp();
}

// The warps that work on tokens, and the columns of each.
struct TokenWarps {
  unsigned blocks;  // of warps that work on tokens
  int warps;        // of a block
  int64_t columns;  // of a warp, a multiple of kStep

  __device__ int64_t token() const { return int64_t{blockIdx.x} * warps + threadIdx.x / 32; }
  __device__ int64_t row() const {
    return (int64_t{blockIdx.x} - blocks) * warps + threadIdx.x / 32;
  }
  __device__ int64_t begin() const { return blockIdx.y * columns + threadIdx.x % 32 * 8; }
  __device__ int64_t end(int64_t cols) const { return min(cols, (blockIdx.y + 1) * columns); }
  __device__ RowOfToken* list(RowOfToken* shared, int64_t slots) const {
    return shared + threadIdx.x / 32 * slots;
  }
};

constexpr int kCopied = 0, kImprobable = 1, kWrittenByAnother = 2;  // RowOfToken::kind

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 4 : 5)
    send_rows(const __grid_constant__ DispatchArguments a, const __grid_constant__ TokenWarps p) {
  extern __shared__ RowOfToken lists[];
  const int64_t cols = a.x.cols, entries = a.x.rows * a.slots;
  T* y = static_cast<T*>(a.y);
  Columns<T, kVectors> zeros;
  zeros.clear();
  if (blockIdx.x < p.blocks) {
    const int64_t token = p.token(), first = token * a.slots;
    if (token >= a.x.rows) return;
    RowOfToken* list = p.list(lists, a.slots);
    const int count =
        list_rows(a.index + first, static_cast<int>(a.slots), a.rows, list, [](int) {});
    complete_rows(list, count, [&](RowOfToken& entry) {
      if (a.sources[entry.row] != first + entry.slot) {
        entry.kind = kWrittenByAnother;
      } else if (a.probs != nullptr) {
        const unsigned long long prob = load_bits(a.probs, a.prob_bytes, first + entry.slot);
        if (blockIdx.y == 0) store_bits(a.permuted, a.prob_bytes, entry.row, prob);
        if (a.skips_improbable && is_zero(prob, a.prob_bytes)) entry.kind = kImprobable;
      }
    });
    if (count == 0) return;
    const T* x = static_cast<const T*>(a.x.data) + token * a.x.stride;
    const int64_t end = p.end(cols);
    for (int64_t column = p.begin(); column < end; column += kSteps<T> * kStep) {
      Columns<T, kVectors> columns[kSteps<T>];
#pragma unroll
      for (int step = 0; step < kSteps<T>; ++step)
        if (column + step * kStep < end) columns[step].load(x, column + step * kStep, cols);
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const RowOfToken entry = list[i];
        if (entry.kind == kWrittenByAnother) continue;
        T* to = y + entry.row * cols;
#pragma unroll
        for (int step = 0; step < kSteps<T>; ++step) {
          if (column + step * kStep >= end) break;
          if (entry.kind == kImprobable)
            zeros.store(to, column + step * kStep, cols);
          else
            columns[step].store(to, column + step * kStep, cols);
        }
      }
    }
    return;
  }
  const int64_t row = p.row();
  if (row >= a.rows) return;
  const int lane = threadIdx.x % 32, source = a.sources[row];
  const bool is_known = source >= 0 && source < entries;
  if (is_known && a.index[source] == row) return;  // the warps of its token write it
  bool is_copy = is_known;
  if (a.probs != nullptr) {
    const unsigned long long prob = is_known ? load_bits(a.probs, a.prob_bytes, source) : 0;
    if (lane == 0 && blockIdx.y == 0) store_bits(a.permuted, a.prob_bytes, row, prob);
    is_copy = is_copy && !(a.skips_improbable && is_zero(prob, a.prob_bytes));
  }
  const T* x = static_cast<const T*>(a.x.data) + (is_known ? source / a.slots : 0) * a.x.stride;
  for (int64_t column = p.begin(); column < p.end(cols); column += kStep) {
    Columns<T, kVectors> columns;
    if (is_copy)
      columns.load(x, column, cols);
    else
      columns.clear();
    columns.store(y + row * cols, column, cols);
  }
}

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, 4)
    add_rows(const __grid_constant__ CombineArguments a, const __grid_constant__ TokenWarps p) {
  extern __shared__ RowOfToken lists[];
  const int64_t token = p.token(), first = token * a.slots, cols = a.x.cols;
  if (token >= a.tokens) return;
  RowOfToken* list = p.list(lists, a.slots);
  const bool has_values = a.values != nullptr && blockIdx.y == 0;
  const int count =
      list_rows(a.index + first, static_cast<int>(a.slots), a.x.rows, list, [&](int slot) {
        if (has_values) store_bits(a.values, a.value_bytes, first + slot, 0);
      });
  complete_rows(list, count, [&](RowOfToken& entry) {
    if (has_values)
      store_bits(a.values, a.value_bytes, first + entry.slot,
                 load_bits(a.row_values, a.value_bytes, entry.row));
    entry.bits = __float_as_int(
        a.weights == nullptr ? 1.0f : load_float(a.weights, a.weight_type, first + entry.slot));
  });
  const T* x = static_cast<const T*>(a.x.data);
  T* y = static_cast<T*>(a.y) + token * cols;
  const int64_t end = p.end(cols);
  for (int64_t column = p.begin(); column < end; column += kSteps<T> * kStep) {
    float sums[kSteps<T>][8] = {};
    for (int start = 0; start < count; start += kPair) {
      Columns<T, kVectors> rows[kPair][kSteps<T>];
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        if (start + i >= count) break;
        const T* row = x + list[start + i].row * a.x.stride;
#pragma unroll
        for (int step = 0; step < kSteps<T>; ++step)
          if (column + step * kStep < end) rows[i][step].load(row, column + step * kStep, cols);
      }
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        if (start + i >= count) break;
        const float weight = __int_as_float(list[start + i].bits);
#pragma unroll
        for (int step = 0; step < kSteps<T>; ++step)
#pragma unroll
          for (int j = 0; j < 8; ++j)
            sums[step][j] = __fmaf_rn(rows[i][step][j], weight, sums[step][j]);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps<T>; ++step) {
      if (column + step * kStep >= end) break;
      Columns<T, kVectors> result;
      result.eight = rounded<T>(sums[step]);
      result.store(y, column + step * kStep, cols);
    }
  }
}

// Eight columns times a weight.
template <typename T, bool kVectors>
__device__ void store_scaled(const Columns<T, kVectors>& grad, float weight, T* row, int64_t column,
                             int64_t cols) {
  float scaled[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scaled[j] = __fmul_rn(grad[j], weight);
  Columns<T, kVectors> result;
  result.eight = rounded<T>(scaled);
  result.store(row, column, cols);
}

// The products of a token's gradient with its rows are sums over whole rows, so that a warp has all
// columns of its token.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, 4)
    add_rows_backward(const __grid_constant__ CombineBackwardArguments a,
                      const __grid_constant__ TokenWarps p) {
  extern __shared__ RowOfToken lists[];
  const int lane = threadIdx.x % 32;
  const int64_t tokens = a.grad.rows, rows = a.x.rows, cols = a.x.cols, slots = a.slots;
  const T* grad = static_cast<const T*>(a.grad.data);
  T* grad_x = static_cast<T*>(a.grad_x);
  if (blockIdx.x < p.blocks) {
    const int64_t token = p.token(), first = token * slots;
    if (token >= tokens) return;
    RowOfToken* list = p.list(lists, slots);
    const int count = list_rows(a.index + first, static_cast<int>(slots), rows, list,
                                [&](int slot) { a.grad_weights[first + slot] = 0.0f; });
    complete_rows(list, count, [&](RowOfToken& entry) {
      entry.bits = __float_as_int(load_float(a.weights, a.weight_type, first + entry.slot));
      entry.kind = a.sources[entry.row] == first + entry.slot ? kCopied : kWrittenByAnother;
    });
    const T* of_token = grad + token * a.grad.stride;
    const T* x = static_cast<const T*>(a.x.data);
    for (int start = 0; start < count; start += kAtOnce) {
      float products[kAtOnce] = {};
      for (int64_t column = p.begin(); column < cols; column += kStep) {
        Columns<T, kVectors> g, values[kAtOnce];
        g.load(of_token, column, cols);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (start + i < count) values[i].load(x + list[start + i].row * a.x.stride, column, cols);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (start + i >= count) break;
          const RowOfToken entry = list[start + i];
#pragma unroll
          for (int j = 0; j < 8; ++j) products[i] = __fmaf_rn(g[j], values[i][j], products[i]);
          if (entry.kind == kCopied)
            store_scaled(g, __int_as_float(entry.bits), grad_x + entry.row * cols, column, cols);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (start + i >= count) break;
#pragma unroll
        for (int other = 16; other > 0; other /= 2)
          products[i] += __shfl_xor_sync(0xFFFFFFFFu, products[i], other);
        if (lane == 0) a.grad_weights[first + list[start + i].slot] = products[i];
      }
    }
    return;
  }
  const int64_t row = p.row();
  if (row >= rows) return;
  const int source = a.sources[row];
  const bool is_known = source >= 0 && source < tokens * slots;
  if (is_known && a.index[source] == row) return;  // the warp of its token writes it
  const float weight = is_known ? load_float(a.weights, a.weight_type, source) : 0.0f;
  const T* of_token = grad + (is_known ? source / slots : 0) * a.grad.stride;
  for (int64_t column = lane * 8; column < cols; column += kStep) {
    Columns<T, kVectors> g;
    if (is_known)
      g.load(of_token, column, cols);
    else
      g.clear();
    store_scaled(g, is_known ? weight : 0.0f, grad_x + row * cols, column, cols);
  }
}

// A block for as many tokens as leave room for their lists; warps of a part of the columns each
// where whole rows would leave multiprocessors without work.
TokenWarps warps_of(int64_t tokens, int64_t slots, int64_t cols, int multiprocessors) {
  constexpr int kWarpsOfMultiprocessor = 40;
  TokenWarps p;
  p.warps =
      static_cast<int>(std::clamp<int64_t>(kMostSlots / std::max<int64_t>(slots, 1), 1, kWarps));
  p.blocks = static_cast<unsigned>((tokens + p.warps - 1) / p.warps);
  const int64_t steps = std::max<int64_t>((cols + kStep - 1) / kStep, 1);
  const int64_t wanted = int64_t{kWarpsOfMultiprocessor} * multiprocessors;
  const int64_t parts = std::clamp<int64_t>(wanted / std::max<int64_t>(tokens, 1), 1, steps);
  p.columns = (steps + parts - 1) / parts * kStep;
  return p;
}

// The blocks of warps for tokens and, behind them, for rows; and the parts of their columns.
dim3 grid_of(const TokenWarps& p, int64_t rows, int64_t cols) {
  const int64_t parts = std::max<int64_t>((cols + p.columns - 1) / p.columns, 1);
  return dim3(p.blocks + static_cast<unsigned>((rows + p.warps - 1) / p.warps),
              static_cast<unsigned>(parts));
}

std::size_t list_bytes(const TokenWarps& p, int64_t slots) {
  return p.warps * slots * sizeof(RowOfToken);
}

}  // namespace

void launch_dispatch(const RowsDesc& desc, const DispatchArguments& a, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const TokenWarps p = warps_of(a.x.rows, a.slots, a.x.cols, num_multiprocessors(desc.device));
  const dim3 grid = grid_of(p, a.rows, a.x.cols);
  const std::size_t shared = list_bytes(p, a.slots);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    if (reads_vectors(a.x, desc.input))
      send_rows<T, /*kVectors=*/true><<<grid, 32 * p.warps, shared, stream>>>(a, p);
    else
      send_rows<T, /*kVectors=*/false><<<grid, 32 * p.warps, shared, stream>>>(a, p);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_combine(const RowsDesc& desc, const CombineArguments& a, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const TokenWarps p = warps_of(a.tokens, a.slots, a.x.cols, num_multiprocessors(desc.device));
  const dim3 grid = grid_of(p, 0, a.x.cols);
  const std::size_t shared = list_bytes(p, a.slots);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    if (reads_vectors(a.x, desc.input))
      add_rows<T, /*kVectors=*/true><<<grid, 32 * p.warps, shared, stream>>>(a, p);
    else
      add_rows<T, /*kVectors=*/false><<<grid, 32 * p.warps, shared, stream>>>(a, p);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_combine_backward(const RowsDesc& desc, const CombineBackwardArguments& a,
                             cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  TokenWarps p = warps_of(a.grad.rows, a.slots, a.x.cols, num_multiprocessors(desc.device));
  p.columns = std::max<int64_t>((a.x.cols + kStep - 1) / kStep, 1) * kStep;
  const dim3 grid = grid_of(p, a.x.rows, a.x.cols);
  const std::size_t shared = list_bytes(p, a.slots);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    if (reads_vectors(a.x, desc.input) && reads_vectors(a.grad, desc.input))
      add_rows_backward<T, /*kVectors=*/true><<<grid, 32 * p.warps, shared, stream>>>(a, p);
    else
      add_rows_backward<T, /*kVectors=*/false><<<grid, 32 * p.warps, shared, stream>>>(a, p);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
