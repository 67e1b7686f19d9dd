// Routes from masks: the tokens of each expert are counted in blocks of 256 tokens and 32 experts,
// the counts are added up expert by expert, and the blocks are read again to number the rows. A
// cluster of blocks does it in one launch where the mask is small.
#include <algorithm>

#include "../cluster.cuh"
#include "permutation.h"

namespace fp8core {
namespace {

constexpr int kThreads = kTokensPerBlock;
constexpr int kWarps = kThreads / 32;
constexpr int kScanThreads = 1024;
constexpr int64_t kMostFillBlocks = 1024;
constexpr int kClusterBlocks = 8;
constexpr int kTokensPerThread = 8;  // at most, in the cluster
constexpr int kClusterTokens = kClusterBlocks * kThreads * kTokensPerThread;

struct Mask {
  const void* routing;
  int64_t tokens, slots;
  int64_t token_blocks;
};

// A bit for each of 32 experts from `expert` on to which a token goes.
template <typename T>
__device__ uint32_t flags_of(const Mask& mask, int64_t token, int64_t expert) {
  if (token >= mask.tokens) return 0;
  const T* from = static_cast<const T*>(mask.routing) + token * mask.slots + expert;
  const int count = static_cast<int>(min(mask.slots - expert, int64_t{kExpertsPerBlock}));
  uint32_t flags = 0;
  if (sizeof(T) == 1 && count == 32 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    const uint4* vectors = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = __ldg(vectors + half);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 16; ++i)
        flags |= ((words[i / 4] >> (i % 4 * 8) & 0xFFu) != 0 ? 1u : 0u) << (half * 16 + i);
    }
    return flags;
  }
#pragma unroll 8
  for (int i = 0; i < count; ++i) flags |= (__ldg(from + i) != 0 ? 1u : 0u) << i;
  return flags;
}

// How many tokens of each of eight warps go to the block's experts. Lane e of a warp returns the
// number of its warp's tokens that go to expert e, of the first `experts`.
__device__ int count_in_warp(uint32_t flags, int experts) {
  const int lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll 8
  for (int e = 0; e < min(experts, 32); ++e) {
    const int count = __popc(__ballot_sync(0xFFFFFFFFu, flags >> e & 1u));
    if (lane == e) own = count;
  }
  return own;
}

// counts [experts, token_blocks].
template <typename T>
__global__ void __launch_bounds__(kThreads) count_mask(const Mask mask, int32_t* counts) {
  __shared__ int shared[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x;
  const int64_t expert = int64_t{blockIdx.y} * kExpertsPerBlock;
  const int experts = static_cast<int>(min(mask.slots - expert, int64_t{32}));
  shared[warp][lane] = count_in_warp(flags_of<T>(mask, token, expert), experts);
  __syncthreads();
  if (warp != 0 || expert + lane >= mask.slots) return;
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += shared[i][lane];
  counts[(expert + lane) * mask.token_blocks + blockIdx.x] = total;
}

// counts [size + 1] become the sums of those before; the last one is the sum of all.
__global__ void __launch_bounds__(kScanThreads) add_up(int32_t* counts, int64_t size) {
  __shared__ int sums[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;  // of the pieces that are done
  for (int64_t start = 0; start < size; start += kScanThreads * 4) {
    const int64_t at = start + threadIdx.x * 4;
    int values[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = at + i < size ? counts[at + i] : 0;
      own += values[i];
    }
    int up_to = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    int of_warps = sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, of_warps, step);
      if (lane >= step) of_warps += other;
    }
    const int before_warp = __shfl_sync(0xFFFFFFFFu, of_warps, max(warp - 1, 0));
    const int total = __shfl_sync(0xFFFFFFFFu, of_warps, 31);
    int sum = before + (warp > 0 ? before_warp : 0) + up_to - own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < size) counts[at + i] = sum;
      sum += values[i];
    }
    before += total;
    __syncthreads();  // sums are read
  }
  if (threadIdx.x == 0) counts[size] = before;
}

// Numbers the rows of a warp's tokens, lane l's being first_token + l, that go to the 32 experts
// from `expert` on; `first` is the row of the first of them that goes to expert `expert` + lane.
__device__ void number_of_warp(const Mask& mask, uint32_t flags, int64_t first_token,
                               int64_t expert, int first, int64_t rows, int32_t (*places)[33],
                               int32_t* index, int32_t* sources) {
  const int lane = threadIdx.x % 32;
  const int experts = static_cast<int>(min(mask.slots - expert, int64_t{32}));
  const int64_t entry = (first_token + lane) * mask.slots + expert;
#pragma unroll 8
  for (int e = 0; e < experts; ++e) {
    const bool goes = flags >> e & 1u;
    const unsigned tokens = __ballot_sync(0xFFFFFFFFu, goes);
    const int row = __shfl_sync(0xFFFFFFFFu, first, e) + __popc(tokens & ((1u << lane) - 1u));
    const bool is_row = goes && row < rows;
    places[lane][e] = is_row ? row : -1;
    if (is_row) sources[row] = static_cast<int32_t>(entry + e);
  }
  __syncwarp();
  const int tokens = static_cast<int>(min(mask.tokens - first_token, int64_t{32}));
  int32_t* to = index + first_token * mask.slots + expert;
  if (experts == mask.slots) {  // the entries of all tokens are adjacent
    for (int i = lane; i < tokens * experts; i += 32) to[i] = places[i / experts][i % experts];
  } else if (lane < experts) {
    for (int i = 0; i < tokens; ++i) to[i * mask.slots + lane] = places[i][lane];
  }
  __syncwarp();
}

// Numbers the rows; firsts [experts, token_blocks] and the number of all rows behind them.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    number_rows(const Mask mask, const int32_t* firsts, int64_t rows, int32_t* index,
                int32_t* sources) {
  __shared__ int counts[kWarps][32];
  __shared__ int32_t places[kWarps][32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x;
  const int64_t expert = int64_t{blockIdx.y} * kExpertsPerBlock;
  const uint32_t flags = flags_of<T>(mask, token, expert);
  const int experts = static_cast<int>(min(mask.slots - expert, int64_t{32}));
  counts[warp][lane] = count_in_warp(flags, experts);
  __syncthreads();
  int first = 0;  // the row of the first token of this warp that goes to expert `lane`
  if (expert + lane < mask.slots) {
    first = firsts[(expert + lane) * mask.token_blocks + blockIdx.x];
    for (int i = 0; i < warp; ++i) first += counts[i][lane];
  }
  number_of_warp(mask, flags, token - lane, expert, first, rows, places[warp], index, sources);
  // Rows behind the last one take no token.
  const int64_t used = firsts[mask.slots * mask.token_blocks];
  const int64_t block = blockIdx.x + int64_t{blockIdx.y} * gridDim.x;
  const int64_t step = int64_t{gridDim.x} * gridDim.y * kThreads;
  for (int64_t row = used + block * kThreads + threadIdx.x; row < rows; row += step)
    sources[row] = -1;
}

#ifdef FP8CORE_HAS_CLUSTERS
#define FP8CORE_IN_CLUSTERS __cluster_dims__(kClusterBlocks, 1, 1)
#else
#define FP8CORE_IN_CLUSTERS
#endif

// The same by one cluster, of at most 32 experts: each block has `tokens_per_block` tokens, a
// multiple of 32, and each thread one of every kThreads of them.
template <typename T>
__global__ void FP8CORE_IN_CLUSTERS __launch_bounds__(kThreads)
    route_in_cluster(const Mask mask, int tokens_per_block, int64_t rows, int32_t* index,
                     int32_t* sources) {
#ifdef FP8CORE_HAS_CLUSTERS
  __shared__ int32_t places[kWarps][32][33];
  __shared__ int counts[kTokensPerThread][kWarps][32];  // of a warp's tokens, then before them
  __shared__ int of_blocks[kClusterBlocks][32], before[32];
  __shared__ int used;
  cluster_arrive();  // once all blocks run, they may write into each other's memory
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = static_cast<int>(cluster_rank()), experts = static_cast<int>(mask.slots);
  const int64_t first = int64_t{rank} * tokens_per_block;
  const int64_t end = min(first + tokens_per_block, mask.tokens);
  uint32_t flags[kTokensPerThread];
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    const int64_t token = first + i * kThreads + threadIdx.x;
    flags[i] = token < end ? flags_of<T>(mask, token, 0) : 0;
  }
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i)
    if (i * kThreads < tokens_per_block) counts[i][warp][lane] = count_in_warp(flags[i], experts);
  __syncthreads();
  cluster_wait();
  if (warp == 0) {
    int sum = 0;
    for (int i = 0; i < kTokensPerThread && i * kThreads < tokens_per_block; ++i) {
      int own[kWarps];
#pragma unroll
      for (int j = 0; j < kWarps; ++j) own[j] = counts[i][j][lane];
#pragma unroll
      for (int j = 0; j < kWarps; ++j) {
        counts[i][j][lane] = sum;
        sum += own[j];
      }
    }
#pragma unroll
    for (int block = 0; block < kClusterBlocks; ++block)
      store_in_block(&of_blocks[rank][lane], block, sum);
  }
  cluster_arrive();
  cluster_wait();
  if (warp == 0) {
    int of_expert = 0, of_earlier = 0;
#pragma unroll
    for (int block = 0; block < kClusterBlocks; ++block) {
      if (block == rank) of_earlier = of_expert;
      of_expert += of_blocks[block][lane];
    }
    int up_to = of_expert;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
      if (lane >= step) up_to += other;
    }
    before[lane] = up_to - of_expert + of_earlier;
    if (lane == 31) used = up_to;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    const int64_t first_token = first + i * kThreads + warp * 32;
    if (first_token >= end) break;
    number_of_warp(mask, flags[i], first_token, /*expert=*/0, before[lane] + counts[i][warp][lane],
                   rows, places[warp], index, sources);
  }
  // Rows behind the last one take no token.
  const int64_t step = kClusterBlocks * kThreads;
  for (int64_t row = used + int64_t{rank} * kThreads + threadIdx.x; row < rows; row += step)
    sources[row] = -1;
#endif
}

template <typename T>
void launch_mask(const MaskRouteArguments& a, int device, cudaStream_t stream) {
  const int64_t token_blocks = (a.tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  const int64_t expert_blocks = (a.slots + kExpertsPerBlock - 1) / kExpertsPerBlock;
  const Mask mask{a.routing, a.tokens, a.slots, token_blocks};
  if (a.slots <= kExpertsPerBlock && a.tokens <= kClusterTokens && has_clusters(device)) {
    const int64_t each = (a.tokens + kClusterBlocks - 1) / kClusterBlocks;
    const int tokens_per_block = static_cast<int>((each + 31) / 32 * 32);
    route_in_cluster<T><<<kClusterBlocks, kThreads, 0, stream>>>(mask, tokens_per_block, a.rows,
                                                                 a.index, a.sources);
    FP8CORE_CUDA(cudaGetLastError());
    return;
  }
  const dim3 grid(static_cast<unsigned>(token_blocks), static_cast<unsigned>(expert_blocks));
  count_mask<T><<<grid, kThreads, 0, stream>>>(mask, a.workspace);
  FP8CORE_CUDA(cudaGetLastError());
  add_up<<<1, kScanThreads, 0, stream>>>(a.workspace, a.slots * token_blocks);
  FP8CORE_CUDA(cudaGetLastError());
  number_rows<T><<<grid, kThreads, 0, stream>>>(mask, a.workspace, a.rows, a.index, a.sources);
  FP8CORE_CUDA(cudaGetLastError());
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    invert_rows(const T* __restrict__ routing, int64_t entries, int64_t rows, int32_t* index,
                int32_t* sources) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < entries; at += step) {
    const int64_t row = routing[at];
    const bool is_row = row >= 0 && row < rows;
    index[at] = is_row ? static_cast<int32_t>(row) : -1;
    if (is_row) sources[row] = static_cast<int32_t>(at);
  }
}

}  // namespace

void launch_route_by_mask(const MaskRouteArguments& a, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  switch (a.bytes) {
    case 1: return launch_mask<uint8_t>(a, device, stream);
    case 2: return launch_mask<uint16_t>(a, device, stream);
    case 4: return launch_mask<uint32_t>(a, device, stream);
    default: return launch_mask<unsigned long long>(a, device, stream);
  }
}

void launch_route_by_rows(const RowRouteArguments& a, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  if (a.rows > 0) FP8CORE_CUDA(cudaMemsetAsync(a.sources, 0xFF, a.rows * 4, stream));
  if (a.entries == 0) return;
  const auto blocks =
      static_cast<unsigned>(std::min((a.entries + kThreads - 1) / kThreads, kMostFillBlocks));
  if (a.is_long)
    invert_rows<<<blocks, kThreads, 0, stream>>>(static_cast<const int64_t*>(a.routing), a.entries,
                                                 a.rows, a.index, a.sources);
  else
    invert_rows<<<blocks, kThreads, 0, stream>>>(static_cast<const int32_t*>(a.routing), a.entries,
                                                 a.rows, a.index, a.sources);
  FP8CORE_CUDA(cudaGetLastError());
}

}  // namespace fp8core
