// The tiles of a grouped product, computed from offsets on the device: a table of groups in shared
// memory, and a walk over their tiles that every role of a block takes by itself.
#pragma once

#include "../groups.cuh"
#include "grouped_epilogue.cuh"
#include "grouped_params.h"

namespace fp8core::sm90 {

constexpr int kThreads = 384;  // a warpgroup that loads, two that multiply
constexpr int kConsumers = 256, kScaleThreads = 96;
constexpr int kStep = 128;  // elements of k in a stage, bytes of a row in shared memory
constexpr int kTileN = 128;

// Barriers of the multiplying warpgroups; 0 is __syncthreads.
constexpr int kCleared = 1, kTurn = 2, kColumns = 4;  // kTurn and kColumns take two numbers each

template <int kWaves>
struct Stages {
  static constexpr int kTileM = 128 * kWaves;
  static constexpr int kCount = kWaves == 2 ? 4 : 6;
  struct alignas(1024) Shared {
    std::uint8_t a[kCount][kTileM * kStep];
    std::uint8_t b[kCount][kTileN * kStep];
    alignas(16) float scales[kCount][kTileM + kTileN];  // of a's rows, then of b's
    EpilogueShared epilogue;
    std::uint64_t full[kCount], empty[kCount];
    // The groups of this launch, and behind them the tail.
    int start[kGroupsPerLaunch + 1], size[kGroupsPerLaunch + 1];
    int first_block[kGroupsPerLaunch + 1], first_step[kGroupsPerLaunch + 1];
    int tiles[kGroupsPerLaunch + 2];  // of the groups before
  };
};

// Fills the table of groups; by one warp.
template <int kTileM, typename Shared>
__device__ void tabulate(const GroupedParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32, rows = p.contracts ? p.k : p.m;
  GroupLane before_all{};
  for (int base = 0; base < p.first_group + p.count; base += 32) {
    const GroupLane entry = group_lane(p.offsets, p.groups, rows, base, before_all);
    const int at = base + lane - p.first_group;
    if (at >= 0 && at < p.count) {
      shared.start[at] = entry.start;
      shared.size[at] = entry.end - entry.start;
      shared.first_block[at] = entry.blocks_before;
      shared.first_step[at] = entry.steps_before;
    }
    before_all = last_lane(entry);
  }
  if (lane == 0 && p.takes_tail) {
    shared.start[p.count] = before_all.end;
    shared.size[p.count] = rows - before_all.end;
    shared.first_block[p.count] = before_all.blocks_after;
  }
  __syncwarp();
  const int entries = p.count + (p.takes_tail ? 1 : 0), columns = (p.n + kTileN - 1) / kTileN;
  int before = 0;
  for (int base = 0; base < entries; base += 32) {
    const int at = base + lane;
    int sum = 0;
    if (at < entries) sum = ((p.contracts ? p.m : shared.size[at]) + kTileM - 1) / kTileM * columns;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += other;
    }
    sum += before;
    if (at < entries) shared.tiles[at + 1] = sum;
    before = __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  if (lane == 0) shared.tiles[0] = 0;
}

// One tile after another; each role walks by itself, over the same tiles.
template <int kTileM, typename Shared>
struct Walk {
  const GroupedParams& p;
  const Shared& shared;
  int entries, columns;
  int tile;
  int entry = 0;
  // of the current tile
  int start = 0, rows = 0;  // first row of a and d in the tile, and how many are in the group
  int column = 0, k_start = 0, k_size = 0, k_block = 0, steps = 0;
  int scale_row = 0;  // row of a's scales
  bool is_tail = false;

  __device__ Walk(const GroupedParams& params, const Shared& table)
      : p(params),
        shared(table),
        entries(params.count + (params.takes_tail ? 1 : 0)),
        columns((params.n + kTileN - 1) / kTileN),
        tile(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  __device__ bool next() {
    tile += gridDim.x;
    if (tile >= shared.tiles[entries]) return false;
    while (tile >= shared.tiles[entry + 1]) ++entry;
    // Bands of rows, so that blocks that run together share rows of both operands.
    constexpr int kBand = 2048 / kTileM;
    const int size = shared.size[entry], index = tile - shared.tiles[entry];
    const int all_rows = p.contracts ? p.m : size;
    const int band = index / (kBand * columns) * kBand, in_band = index - band * columns;
    const int height = min(kBand, (all_rows + kTileM - 1) / kTileM - band);
    const int row = (band + in_band % height) * kTileM;
    column = in_band / height * kTileN;
    is_tail = entry == p.count;
    rows = all_rows - row;
    if (p.contracts) {
      start = row;
      k_start = shared.first_step[entry] * kGroupStep;
      k_size = size;
      k_block = shared.first_block[entry];
      scale_row = p.a_in_blocks ? row / 128 : row;
    } else {
      start = shared.start[entry] + row;
      k_start = 0;
      k_size = is_tail ? 0 : p.k;
      k_block = 0;
      scale_row = p.a_in_blocks ? shared.first_block[entry] + row / 128 : start;
    }
    steps = (k_size + kStep - 1) / kStep;
    return true;
  }

  __device__ int group() const { return p.first_group + entry; }
};

}  // namespace fp8core::sm90
