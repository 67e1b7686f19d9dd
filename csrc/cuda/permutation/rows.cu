// Rows sent along a route. A block of threads works on a token and all of its rows, so that what
// all of them share is read once; the first blocks fill the rows that no token writes. What does
// not depend on the route is read before the rows of a token are listed, so that both are on their
// way.
#include <cuda_bf16.h>

#include <algorithm>

#include "../element.h"
#include "../quantize/numerics.cuh"
#include "../quantize/vectors.h"
#include "permutation.h"

namespace fp8core {
namespace {

constexpr int kMostThreads = 256;  // of a block that copies rows
constexpr int kMostAdders = 128;   // of a block that adds or multiplies
constexpr int kAhead = 1024;       // tokens from one to that whose route is fetched beside it
constexpr int kFilled = 32;        // rows that a block looks at which fills rows
constexpr int kPair = 2;           // rows of a token that a thread reads at once
constexpr int kProducts = 16;      // rows of a token whose products are added up at once

// How many times eight columns a thread reads of a row before it waits for the first of them, at
// 16 bits an element; half as many of float32.
constexpr int kSendSteps = 4, kAddSteps = 2;
template <typename T>
constexpr int steps_of(int steps) {
  return sizeof(T) == 4 ? steps / 2 : steps;
}

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

// RowOfToken::bits of a row that is sent.
constexpr int kCopied = 0, kImprobable = 1, kWrittenByAnother = 2;

// A row of a token: its number, its slot, and the bits of its weight.
struct RowOfToken {
  int row, slot, bits;
};

// Has the L2 cache fetch the entries of a later token, which a block would wait for. The first warp
// of a block calls it.
template <typename T>
__device__ void fetch_ahead(const T* entries, int64_t token, int64_t tokens, int64_t slots) {
  constexpr int kLine = 128 / sizeof(T);
  if (token + kAhead >= tokens) return;
  const T* later = entries + (token + kAhead) * slots;
  for (int64_t slot = threadIdx.x % 32 * kLine; slot < slots; slot += 32 * kLine)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(later + slot));
}

// Lists a token's rows in the order of their slots, calls missing(slot) for each slot without a
// row, and returns the number of rows. `bits_of(slot)` is read of every slot, beside its row. The
// first warp of a block calls it.
template <typename BitsOf, typename Missing>
__device__ int list_rows(const int32_t* index, int slots, int64_t rows, RowOfToken* list,
                         const BitsOf& bits_of, const Missing& missing) {
  constexpr int kReads = 4;  // of a lane, before it waits for the first
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int base = 0; base < slots; base += 32 * kReads) {
    int row[kReads], bits[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int slot = base + i * 32 + lane;
      row[i] = slot < slots ? __ldg(index + slot) : -1;
      bits[i] = slot < slots ? bits_of(slot) : 0;
    }
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int slot = base + i * 32 + lane;
      const bool is_row = row[i] >= 0 && row[i] < rows;
      const unsigned listed = __ballot_sync(0xFFFFFFFFu, is_row);
      if (is_row)
        list[total + __popc(listed & ((1u << lane) - 1u))] = {row[i], slot, bits[i]};
      else if (slot < slots)
        missing(slot);
      total += __popc(listed);
    }
  }
  return total;
}

// The columns of a block's rows that a thread works on: kSteps times eight, those of one step of
// all threads behind each other, and so on behind those of all steps.
template <int kSteps>
struct Span {
  int64_t cols;
  __device__ int64_t begin() const { return threadIdx.x * 8; }
  __device__ int64_t step() const { return blockDim.x * 8; }
  __device__ int64_t size() const { return kSteps * step(); }
  // Calls run(i, column) for the columns from `column` on of each step.
  template <typename Run>
  __device__ void for_steps(int64_t column, const Run& run) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (column + i * step() < cols) run(i, column + i * step());
  }
  template <typename T, bool kVectors>
  __device__ void load(const T* row, int64_t column, Columns<T, kVectors> (&to)[kSteps]) const {
    for_steps(column, [&](int i, int64_t at) { to[i].load(row, at, cols); });
  }
  template <typename T, bool kVectors>
  __device__ void store(const Columns<T, kVectors> (&from)[kSteps], T* row, int64_t column) const {
    for_steps(column, [&](int i, int64_t at) { from[i].store(row, at, cols); });
  }
};

// Calls fill(row, source) for the rows of a block that no token writes: `source` is the entry that
// the row is said to come from, or negative. All threads of the block call it.
template <typename Fill>
__device__ void for_unwritten(const int32_t* index, const int32_t* sources, int64_t entries,
                              int64_t rows, const Fill& fill) {
  const int64_t first = int64_t{blockIdx.x} * kFilled, row = first + threadIdx.x % 32;
  int source = row < rows ? sources[row] : -1;
  if (source >= entries) source = -1;
  const bool is_written = row >= rows || (source >= 0 && index[source] == row);
  unsigned unwritten = __ballot_sync(0xFFFFFFFFu, !is_written);
  for (; unwritten != 0; unwritten &= unwritten - 1) {
    const int lane = __ffs(unwritten) - 1;
    fill(first + lane, __shfl_sync(0xFFFFFFFFu, source, lane));
  }
}

template <typename T, bool kVectors>
__device__ void fill_rows(const DispatchArguments& a) {
  const Span<1> span{a.x.cols};
  for_unwritten(a.index, a.sources, a.x.rows * a.slots, a.rows, [&](int64_t row, int source) {
    bool is_copy = source >= 0;
    if (a.permuted != nullptr) {
      const unsigned long long prob = is_copy ? load_bits(a.probs, a.prob_bytes, source) : 0;
      if (threadIdx.x == 0) store_bits(a.permuted, a.prob_bytes, row, prob);
      is_copy = is_copy && !(a.skips_improbable && is_zero(prob, a.prob_bytes));
    }
    const T* x = static_cast<const T*>(a.x.data) + (is_copy ? source / a.slots : 0) * a.x.stride;
    for (int64_t column = span.begin(); column < span.cols; column += span.step()) {
      Columns<T, kVectors> columns;
      columns.clear();
      if (is_copy) columns.load(x, column, span.cols);
      columns.store(static_cast<T*>(a.y) + row * span.cols, column, span.cols);
    }
  });
}

template <typename T, bool kVectors, int kSteps>
__global__ void __launch_bounds__(kMostThreads, 4)
    send_rows(const __grid_constant__ DispatchArguments a, const unsigned fill_blocks) {
  extern __shared__ RowOfToken list[];
  __shared__ int count;
  if (blockIdx.x < fill_blocks) return fill_rows<T, kVectors>(a);
  const Span<kSteps> span{a.x.cols};
  const int64_t token = blockIdx.x - fill_blocks, first = token * a.slots;
  const T* x = static_cast<const T*>(a.x.data) + token * a.x.stride;
  T* y = static_cast<T*>(a.y);
  Columns<T, kVectors> columns[kSteps];
  span.load(x, span.begin(), columns);
  if (threadIdx.x < 32) {
    fetch_ahead(a.index, token, a.x.rows, a.slots);
    const int listed = list_rows(
        a.index + first, static_cast<int>(a.slots), a.rows, list, [](int) { return 0; },
        [](int) {});
    __syncwarp();
    for (int i = threadIdx.x; i < listed; i += 32) {
      RowOfToken& entry = list[i];
      if (a.sources[entry.row] != first + entry.slot) {
        entry.bits = kWrittenByAnother;
      } else if (a.permuted != nullptr) {
        const unsigned long long prob = load_bits(a.probs, a.prob_bytes, first + entry.slot);
        store_bits(a.permuted, a.prob_bytes, entry.row, prob);
        if (a.skips_improbable && is_zero(prob, a.prob_bytes)) entry.bits = kImprobable;
      }
    }
    if (threadIdx.x == 0) count = listed;
  }
  __syncthreads();
  Columns<T, kVectors> zeros[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) zeros[i].clear();
  for (int64_t column = span.begin(); column < span.cols; column += span.size()) {
    if (column != span.begin()) span.load(x, column, columns);
    for (int i = 0; i < count; ++i) {
      const RowOfToken entry = list[i];
      if (entry.bits == kCopied)
        span.store(columns, y + entry.row * span.cols, column);
      else if (entry.bits == kImprobable)
        span.store(zeros, y + entry.row * span.cols, column);
    }
  }
}

template <typename T, bool kVectors, int kSteps>
__global__ void __launch_bounds__(kMostAdders, 8)
    add_rows(const __grid_constant__ CombineArguments a) {
  extern __shared__ RowOfToken list[];
  __shared__ int count;
  const Span<kSteps> span{a.x.cols};
  const int64_t token = blockIdx.x, first = token * a.slots;
  if (threadIdx.x < 32) {
    fetch_ahead(a.index, token, a.tokens, a.slots);
    if (a.weights != nullptr && a.weight_type == InputType::kFloat32)
      fetch_ahead(static_cast<const float*>(a.weights), token, a.tokens, a.slots);
    const int listed = list_rows(
        a.index + first, static_cast<int>(a.slots), a.x.rows, list,
        [&](int slot) {
          return __float_as_int(
              a.weights == nullptr ? 1.0f : load_float(a.weights, a.weight_type, first + slot));
        },
        [&](int slot) {
          if (a.values != nullptr) store_bits(a.values, a.value_bytes, first + slot, 0);
        });
    if (threadIdx.x == 0) count = listed;
  }
  __syncthreads();
  if (a.values != nullptr)
    for (int i = threadIdx.x; i < count; i += blockDim.x)
      store_bits(a.values, a.value_bytes, first + list[i].slot,
                 load_bits(a.row_values, a.value_bytes, list[i].row));
  const T* x = static_cast<const T*>(a.x.data);
  T* y = static_cast<T*>(a.y) + token * span.cols;
  for (int64_t column = span.begin(); column < span.cols; column += span.size()) {
    float sums[kSteps][8] = {};
    for (int start = 0; start < count; start += kPair) {
      Columns<T, kVectors> rows[kPair][kSteps];
#pragma unroll
      for (int i = 0; i < kPair; ++i)
        if (start + i < count) span.load(x + list[start + i].row * a.x.stride, column, rows[i]);
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        if (start + i >= count) break;
        const float weight = __int_as_float(list[start + i].bits);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int j = 0; j < 8; ++j)
            sums[step][j] = __fmaf_rn(rows[i][step][j], weight, sums[step][j]);
      }
    }
    Columns<T, kVectors> results[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) results[step].eight = rounded<T>(sums[step]);
    span.store(results, y, column);
  }
}

// Columns times a weight.
template <typename T, bool kVectors, int kSteps>
__device__ void store_scaled(const Span<kSteps>& span, const Columns<T, kVectors> (&grad)[kSteps],
                             float weight, T* row, int64_t column) {
  Columns<T, kVectors> results[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) scaled[j] = __fmul_rn(grad[i][j], weight);
    results[i].eight = rounded<T>(scaled);
  }
  span.store(results, row, column);
}

template <typename T, bool kVectors, int kSteps>
__device__ void fill_gradients(const CombineBackwardArguments& a) {
  const Span<kSteps> span{a.x.cols};
  for_unwritten(a.index, a.sources, a.grad.rows * a.slots, a.x.rows, [&](int64_t row, int source) {
    const bool is_known = source >= 0;
    const float weight = is_known ? load_float(a.weights, a.weight_type, source) : 0.0f;
    const T* grad =
        static_cast<const T*>(a.grad.data) + (is_known ? source / a.slots : 0) * a.grad.stride;
    T* to = static_cast<T*>(a.grad_x) + row * span.cols;
    for (int64_t column = span.begin(); column < span.cols; column += span.size()) {
      Columns<T, kVectors> g[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) g[i].clear();
      if (is_known) span.load(grad, column, g);
      store_scaled(span, g, weight, to, column);
    }
  });
}

// The products of a token's gradient with its rows are sums over whole rows: of each warp in
// `sums`, then of the block.
template <typename T, bool kVectors, int kSteps>
__global__ void __launch_bounds__(kMostAdders, 8)
    add_rows_backward(const __grid_constant__ CombineBackwardArguments a,
                      const unsigned fill_blocks) {
  extern __shared__ RowOfToken list[];
  __shared__ int count;
  __shared__ float sums[kProducts][kMostAdders / 32];
  if (blockIdx.x < fill_blocks) return fill_gradients<T, kVectors, kSteps>(a);
  const Span<kSteps> span{a.x.cols};
  const int64_t token = blockIdx.x - fill_blocks, first = token * a.slots;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const T* grad = static_cast<const T*>(a.grad.data) + token * a.grad.stride;
  const T* x = static_cast<const T*>(a.x.data);
  T* grad_x = static_cast<T*>(a.grad_x);
  Columns<T, kVectors> g[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) g[i].clear();
  span.load(grad, span.begin(), g);
  if (warp == 0) {
    fetch_ahead(a.index, token, a.grad.rows, a.slots);
    if (a.weight_type == InputType::kFloat32)
      fetch_ahead(static_cast<const float*>(a.weights), token, a.grad.rows, a.slots);
    const int listed = list_rows(
        a.index + first, static_cast<int>(a.slots), a.x.rows, list,
        [&](int slot) {
          return __float_as_int(load_float(a.weights, a.weight_type, first + slot));
        },
        [&](int slot) { a.grad_weights[first + slot] = 0.0f; });
    if (lane == 0) count = listed;
  }
  __syncthreads();
  for (int base = 0; base < count; base += kProducts) {
    const int end = min(count, base + kProducts);
    for (int i = lane; i < end - base; i += 32) sums[i][warp] = 0.0f;
    __syncwarp();
    // All lanes of a warp go on together, also those behind the last column.
    for (int64_t start = 0; start < span.cols; start += span.size()) {
      const int64_t column = start + span.begin();
      if (start != 0 || base != 0) span.load(grad, column, g);
      for (int at = base; at < end; at += kPair) {
        Columns<T, kVectors> rows[kPair][kSteps];
        float products[kPair] = {};
        bool is_written[kPair] = {};  // by this token
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) rows[i][step].clear();
          if (at + i >= end) continue;
          const int row = list[at + i].row;
          span.load(x + row * a.x.stride, column, rows[i]);
          is_written[i] = a.sources[row] == first + list[at + i].slot;
        }
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
          if (at + i >= end) continue;
          span.for_steps(column, [&](int step, int64_t) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
              products[i] = __fmaf_rn(g[step][j], rows[i][step][j], products[i]);
          });
          if (is_written[i])
            store_scaled(span, g, __int_as_float(list[at + i].bits),
                         grad_x + list[at + i].row * span.cols, column);
        }
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
#pragma unroll
          for (int other = 16; other > 0; other /= 2)
            products[i] += __shfl_xor_sync(0xFFFFFFFFu, products[i], other);
          if (lane == 0 && at + i < end) sums[at + i - base][warp] += products[i];
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < end - base) {
      float sum = sums[threadIdx.x][0];
      for (int i = 1; i < warps; ++i) sum += sums[threadIdx.x][i];
      a.grad_weights[first + list[base + threadIdx.x].slot] = sum;
    }
    __syncthreads();  // sums are read
  }
}

// As many threads of a block as have columns, but no more than `most`.
unsigned threads_of(int64_t cols, int steps, int most) {
  const int64_t warps = (cols + 32 * 8 * steps - 1) / (32 * 8 * steps);
  return static_cast<unsigned>(std::clamp<int64_t>(warps, 1, most / 32) * 32);
}

unsigned fill_blocks_of(int64_t rows) {
  return static_cast<unsigned>((rows + kFilled - 1) / kFilled);
}

// Of a pair more than the slots: a thread may read what lies behind the last row, to throw it away.
std::size_t list_bytes(int64_t slots) { return (slots + kPair) * sizeof(RowOfToken); }

}  // namespace

void launch_dispatch(const RowsDesc& desc, const DispatchArguments& a, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const unsigned fill_blocks = fill_blocks_of(a.rows);
  const unsigned blocks = fill_blocks + static_cast<unsigned>(a.x.rows);
  const std::size_t shared = list_bytes(a.slots);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    constexpr int kSteps = steps_of<T>(kSendSteps);
    const unsigned threads = threads_of(a.x.cols, kSteps, kMostThreads);
    if (reads_vectors(a.x, desc.input))
      send_rows<T, /*kVectors=*/true, kSteps><<<blocks, threads, shared, stream>>>(a, fill_blocks);
    else
      send_rows<T, /*kVectors=*/false, kSteps><<<blocks, threads, shared, stream>>>(a, fill_blocks);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_combine(const RowsDesc& desc, const CombineArguments& a, cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const auto blocks = static_cast<unsigned>(a.tokens);
  const std::size_t shared = list_bytes(a.slots);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    constexpr int kSteps = steps_of<T>(kAddSteps);
    const unsigned threads = threads_of(a.x.cols, kSteps, kMostAdders);
    if (reads_vectors(a.x, desc.input))
      add_rows<T, /*kVectors=*/true, kSteps><<<blocks, threads, shared, stream>>>(a);
    else
      add_rows<T, /*kVectors=*/false, kSteps><<<blocks, threads, shared, stream>>>(a);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

void launch_combine_backward(const RowsDesc& desc, const CombineBackwardArguments& a,
                             cudaStream_t stream) {
  const DeviceGuard guard(desc.device);
  const unsigned fill_blocks = fill_blocks_of(a.x.rows);
  const unsigned blocks = fill_blocks + static_cast<unsigned>(a.grad.rows);
  const std::size_t shared = list_bytes(a.slots);
  with_type(desc.input, [&](auto type) {
    using T = ElementOf<type()>;
    constexpr int kSteps = steps_of<T>(kAddSteps);
    const unsigned threads = threads_of(a.x.cols, kSteps, kMostAdders);
    if (reads_vectors(a.x, desc.input) && reads_vectors(a.grad, desc.input))
      add_rows_backward<T, /*kVectors=*/true, kSteps>
          <<<blocks, threads, shared, stream>>>(a, fill_blocks);
    else
      add_rows_backward<T, /*kVectors=*/false, kSteps>
          <<<blocks, threads, shared, stream>>>(a, fill_blocks);
  });
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
