// Grouped FP8 products on Hopper. A block of three warpgroups takes tile after tile of d: one warp
// has the copy engine fill a ring of stages (128 elements of k of a's and b's rows), three bring
// the scales of blocks along k, two warpgroups multiply.
//
// A tile is kWaves x 128 rows by 128 columns. Warpgroup w has the rows 128 v + 64 w .. + 63 of each
// wave v, all 128 columns: kWaves x 64 sums a thread. Sums of 128 products are taken in the tensor
// core, which keeps about 14 bits, and added up in float32, unless fast accumulation is asked for.
//
// A tile writes rows of one group alone, but may read beyond the group's end. Rows of another group
// lead to rows of the product that are not stored. Elements of k of another group would be summed,
// so zeros overwrite their codes in shared memory, in both operands, since NaN times 0 is NaN.
#pragma once

#include <algorithm>

#include "sm90_instructions.cuh"
#include "sm90_schedule.cuh"

namespace fp8core::sm90 {

// A position in the ring of stages.
template <int kCount>
struct Ring {
  int stage = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++stage == kCount) stage = 0, phase ^= 1;
  }
};

// One thread: has the copy engine bring codes.
template <int kWaves>
__device__ void bring_codes(const GroupedParams& p, typename Stages<kWaves>::Shared& shared) {
  using S = Stages<kWaves>;
  Walk<S::kTileM, typename S::Shared> at(p, shared);
  Ring<S::kCount> ring;
  while (at.next()) {
    const CUtensorMap* b = &p.b[p.contracts || at.is_tail ? 0 : at.entry];
    for (int step = 0; step < at.steps; ++step, ring.advance()) {
      const int k = at.k_start + step * kStep;
      wait(&shared.empty[ring.stage], ring.phase ^ 1);
      std::uint64_t* full = &shared.full[ring.stage];
      arrive_expecting(full, (S::kTileM + kTileN) * kStep);
      copy_box(&p.a, full, shared.a[ring.stage], k, at.start);
      copy_box(b, full, shared.b[ring.stage], k, at.column);
    }
  }
}

// Three warps: copy the scales of blocks along k, four rows a thread.
template <int kWaves>
__device__ void bring_scales(const GroupedParams& p, typename Stages<kWaves>::Shared& shared) {
  using S = Stages<kWaves>;
  constexpr int kRows = S::kTileM + kTileN, kEach = (kRows + kScaleThreads - 1) / kScaleThreads;
  Walk<S::kTileM, typename S::Shared> at(p, shared);
  Ring<S::kCount> ring;
  const int first = static_cast<int>(threadIdx.x) - 32;
  const int a_shift = p.a_in_blocks ? 7 : 0, b_shift = p.b_in_blocks ? 7 : 0;
  while (at.next()) {
    if (at.steps == 0) continue;
    const float* a = p.a_scale + at.scale_row * p.a_row_stride + at.k_block * p.a_k_stride;
    const float* b = p.b_scale[p.contracts ? 0 : at.entry] +
                     (at.column >> b_shift) * p.b_row_stride + at.k_block * p.b_k_stride;
    const float* from[kEach];
    bool is_there[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = first + i * kScaleThreads, b_row = row - S::kTileM;
      is_there[i] = b_row < 0 ? row < at.rows : b_row < p.n - at.column;
      from[i] = b_row < 0 ? a : b;
      if (is_there[i])
        from[i] +=
            b_row < 0 ? (row >> a_shift) * p.a_row_stride : (b_row >> b_shift) * p.b_row_stride;
    }
    for (int step = 0; step < at.steps; ++step, ring.advance()) {
      wait(&shared.empty[ring.stage], ring.phase ^ 1);
      const bool is_inside = at.k_block + step < p.scale_blocks;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = first + i * kScaleThreads;
        if (row < kRows)
          copy_word(&shared.scales[ring.stage][row], from[i], is_there[i] && is_inside);
        from[i] += row < S::kTileM ? p.a_k_stride : p.b_k_stride;
      }
      arrive_after_copies(&shared.full[ring.stage]);
    }
  }
}

// Overwrites the codes from `valid` on in every row of a stage; by all threads that multiply.
template <int kTileM, typename Shared>
__device__ void clear_tail(Shared& shared, int stage, int valid) {
  for (int row = threadIdx.x - 128; row < kTileM + kTileN; row += kConsumers) {
    std::uint8_t* codes =
        row < kTileM ? shared.a[stage] + row * kStep : shared.b[stage] + (row - kTileM) * kStep;
    for (int chunk = valid / 16; chunk < kStep / 16; ++chunk) {
      auto* to = reinterpret_cast<uint4*>(codes + ((chunk ^ row % 8) * 16));  // as swizzled
      uint4 kept = make_uint4(0, 0, 0, 0);
      const int left = valid - chunk * 16;
      if (left > 0) {
        kept = *to;
        const auto cut = [&](std::uint32_t word, int at) {
          const int bytes = left - at;
          return bytes >= 4 ? word : bytes <= 0 ? 0u : word & ((1u << 8 * bytes) - 1);
        };
        kept = make_uint4(cut(kept.x, 0), cut(kept.y, 4), cut(kept.z, 8), cut(kept.w, 12));
      }
      *to = kept;
    }
  }
  fence_async();
  meet(kCleared, kConsumers);
}

// Scales of a stage for the thread's rows, times that of b where there is one.
template <Accumulation kHow, int kWaves, typename Shared>
__device__ void read_scales(float (&scales)[kWaves][2], const Shared& shared, int stage,
                            int first) {
  if constexpr (kHow == Accumulation::kRowScales || kHow == Accumulation::kBothScales) {
    const float b = kHow == Accumulation::kRowScales ? shared.scales[stage][128 * kWaves] : 1.0f;
#pragma unroll
    for (int v = 0; v < kWaves; ++v)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales[v][half] = shared.scales[stage][128 * v + first + 8 * half] * b;
  }
}

// sums += products * scales, for one wave.
template <Accumulation kHow>
__device__ void promote(float (&sums)[64], const float (&products)[64], const float (&a)[2],
                        const float* b) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float2 b_scales = make_float2(1.0f, 1.0f);
    if constexpr (kHow == Accumulation::kBothScales)
      b_scales = *reinterpret_cast<const float2*>(b + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = kHow == Accumulation::kFloat32 ? 1.0f
                          : kHow == Accumulation::kRowScales
                              ? a[i / 2]
                              : a[i / 2] * (i % 2 == 0 ? b_scales.x : b_scales.y);
      sums[4 * j + i] += products[4 * j + i] * scale;
    }
  }
}

// Products of 64 rows by 128 over kCount times 32 elements of k.
template <Format A, Format B, int kCount>
__device__ void multiply_some(float (&d)[64], std::uint64_t a, std::uint64_t b, bool adds) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) multiply<A, B>(d, a + 2 * k, b + 2 * k, k > 0 || adds);
}

// All steps of one tile, by one of the two warpgroups. Sums in float32 take the cores away from the
// tensor core, so the warpgroups take turns: one begins when half of the other's products are done.
template <Format A, Format B, Accumulation kHow, int kWaves>
__device__ void sum_up(float (&sums)[kWaves][64], typename Stages<kWaves>::Shared& shared,
                       Ring<Stages<kWaves>::kCount>& ring, int steps, int last_size,
                       bool contracts) {
  using S = Stages<kWaves>;
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1;
  const int first = 64 * group + thread / 32 * 16 + thread % 32 / 4;
  const auto release = [&](int stage) {
    __syncwarp();
    if (thread % 32 == 0) arrive(&shared.empty[stage]);
  };
  int before = 0;  // the stage before, of which products may still be under way
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const int stage = ring.stage;
    wait(&shared.full[stage], ring.phase);
    if (contracts && step == steps - 1 && last_size < kStep)
      clear_tail<S::kTileM>(shared, stage, last_size);
    const std::uint8_t* a = shared.a[stage] + 64 * group * kStep;
    const std::uint64_t b = matrix_descriptor(shared.b[stage]);
    if constexpr (kHow == Accumulation::kTensorCore) {
      begin_products();
#pragma unroll
      for (int v = 0; v < kWaves; ++v)
        multiply_some<A, B, 4>(sums[v], matrix_descriptor(a + v * 128 * kStep), b, step > 0);
      commit_products();
      if (step > 0) {
        wait_products<1>();
        release(before);
      }
      before = stage;
    } else {
      float products[64], scales[kWaves][2];
      read_scales<kHow>(scales, shared, stage, first);
#pragma unroll
      for (int v = 0; v < kWaves; ++v) {
        const std::uint64_t a_rows = matrix_descriptor(a + v * 128 * kStep);
        meet(kTurn + group, kConsumers);
        hold(products);
        begin_products();
        multiply_some<A, B, 2>(products, a_rows, b, false);
        commit_products();
        multiply_some<A, B, 2>(products, a_rows + 4, b + 4, true);
        commit_products();
        wait_products<1>();
        pass(kTurn + 1 - group, kConsumers);
        wait_products<0>();
        hold(products);
        if (kHow != Accumulation::kBothScales && v == kWaves - 1) release(stage);
        promote<kHow>(sums[v], products, scales[v], shared.scales[stage] + S::kTileM);
      }
      if (kHow == Accumulation::kBothScales) release(stage);
    }
  }
  if (kHow == Accumulation::kTensorCore && steps > 0) {
    wait_products<0>();
#pragma unroll
    for (int v = 0; v < kWaves; ++v) hold(sums[v]);
    release(before);
  }
}

template <Format A, Format B, Accumulation kHow, int kWaves>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_product(const __grid_constant__ GroupedParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Stages<kWaves>;
  extern __shared__ std::uint8_t memory[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(
      memory + (1024 - shared_address(memory) % 1024) % 1024);
  constexpr bool kHasScales = kHow == Accumulation::kRowScales || kHow == Accumulation::kBothScales;
  if (threadIdx.x < 32) tabulate<S::kTileM>(p, shared);
  if (threadIdx.x == 32) {
    for (int stage = 0; stage < S::kCount; ++stage) {
      init_barrier(&shared.full[stage], 1 + (kHasScales ? kScaleThreads : 0));
      init_barrier(&shared.empty[stage], kConsumers / 32);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<56>();
    if (threadIdx.x == 0) bring_codes<kWaves>(p, shared);
    if (kHasScales && threadIdx.x >= 32) bring_scales<kWaves>(p, shared);
  } else {
    take_registers<224>();
    Walk<S::kTileM, typename S::Shared> at(p, shared);
    Ring<S::kCount> ring;
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1;
    const int first = 64 * group + thread / 32 * 16 + thread % 32 / 4;
    int parity = 0;
    constexpr bool kTakesTurns = kHow != Accumulation::kTensorCore;
    if (kTakesTurns && group == 1)
      pass(kTurn, kConsumers);  // the first turn is the first warpgroup's
    while (at.next()) {
      const TileOut out{at.start, at.rows,    at.column,    at.group(),
                        at.entry, at.is_tail, at.steps == 0};
      const Factors<kWaves, kHasScales> factors(p, out, first);
      float sums[kWaves][64];
#pragma unroll
      for (int v = 0; v < kWaves; ++v)
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[v][i] = 0.0f;
      const int last = at.k_size - (at.steps - 1) * kStep;
      sum_up<A, B, kHow, kWaves>(sums, shared, ring, at.steps, last, p.contracts);
      float2* columns = shared.epilogue.columns[parity][group];
      columns[thread] = factors.column;
      meet(kColumns + group, 128);
      store<kWaves, kHasScales>(p, out, factors, columns,
                                shared.epilogue.rows[threadIdx.x / 32 - 4], sums, first);
      parity ^= 1;
    }
    if (kTakesTurns && group == 0)
      meet(kTurn, kConsumers);  // takes the last turn, which no product follows
  }
#endif
}

template <Format A, Format B, Accumulation kHow, int kWaves>
void launch_one(const GroupedParams& params, int blocks, cudaStream_t stream) {
  const auto kernel = grouped_product<A, B, kHow, kWaves>;
  constexpr int kBytes = sizeof(typename Stages<kWaves>::Shared) + 1024;
  FP8CORE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<blocks, kThreads, kBytes, stream>>>(params);
  FP8CORE_CUDA(cudaGetLastError());
}

template <Format A, Format B, Accumulation kHow>
void launch_tile(const GroupedParams& params, const GroupedLaunch& launch, cudaStream_t stream) {
  if (launch.is_tall)
    launch_one<A, B, kHow, 2>(params, launch.blocks, stream);
  else
    launch_one<A, B, kHow, 1>(params, launch.blocks, stream);
}

}  // namespace fp8core::sm90

namespace fp8core {

template <Format A, Format B>
void launch_grouped(const GroupedParams& params, const GroupedLaunch& launch, cudaStream_t stream) {
  switch (launch.accumulation) {
    case Accumulation::kTensorCore:
      return sm90::launch_tile<A, B, Accumulation::kTensorCore>(params, launch, stream);
    case Accumulation::kFloat32:
      return sm90::launch_tile<A, B, Accumulation::kFloat32>(params, launch, stream);
    case Accumulation::kRowScales:
      return sm90::launch_tile<A, B, Accumulation::kRowScales>(params, launch, stream);
    case Accumulation::kBothScales:
      return sm90::launch_tile<A, B, Accumulation::kBothScales>(params, launch, stream);
  }
}

}  // namespace fp8core
