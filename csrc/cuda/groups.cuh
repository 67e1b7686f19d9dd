// Groups of rows whose offsets are on the device: which group a block of 128 rows belongs to.
//
// Blocks are counted group by group, so that none reaches into the next group:
//
//     first block of group g = sum over the groups before g of ceil(size / 128)
//
// In codes along k each group begins at a multiple of kGroupStep, with zeros up to there.
//
// Rows behind the last group are the tail. With the tail's there are at most rows / 128 + groups +
// 1 blocks. Offsets are not trusted: they are limited to 0 .. rows, and one that is less than the
// one before counts as equal to it.
#pragma once

#include <cstdint>

#include "fp8core/quantize.h"

namespace fp8core {

constexpr int kGroupBlock = 128;

struct GroupSpan {
  int group;        // the number of groups for the tail
  int start, end;   // rows
  int first_block;  // of the group
  int first_step;   // of kGroupStep codes along k
};

__host__ __device__ constexpr int group_steps(int size) {
  return (size + kGroupStep - 1) / kGroupStep;
}

__device__ inline int clamp_offset(int64_t offset, int rows) {
  return static_cast<int>(offset < 0 ? 0 : offset > rows ? rows : offset);
}

// 32 groups, one a lane: rows, blocks and steps of group base + lane.
struct GroupLane {
  int start, end;
  int blocks_before, blocks_after;  // of all groups before this one, and including it
  int steps_before, steps_after;    // likewise
};

__device__ inline GroupLane group_lane(const int64_t* offsets, int groups, int rows, int base,
                                       const GroupLane& before) {
  const int lane = threadIdx.x % 32, group = base + lane;
  int end = group < groups ? clamp_offset(offsets[group + 1], rows) : 0;
  end = max(end, before.end);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, end, step);
    if (lane >= step) end = max(end, other);
  }
  int start = __shfl_up_sync(0xFFFFFFFFu, end, 1);
  if (lane == 0) start = before.end;
  const int num_blocks = (end - start + kGroupBlock - 1) / kGroupBlock,
            num_steps = group_steps(end - start);
  int blocks = num_blocks, steps = num_steps;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, blocks, step);
    const int other_steps = __shfl_up_sync(0xFFFFFFFFu, steps, step);
    if (lane >= step) blocks += other, steps += other_steps;
  }
  blocks += before.blocks_after;
  steps += before.steps_after;
  return {start, end, blocks - num_blocks, blocks, steps - num_steps, steps};
}

// The last lane's ends, from which the next 32 groups count on.
__device__ inline GroupLane last_lane(const GroupLane& entry) {
  GroupLane last{};
  last.end = __shfl_sync(0xFFFFFFFFu, entry.end, 31);
  last.blocks_after = __shfl_sync(0xFFFFFFFFu, entry.blocks_after, 31);
  last.steps_after = __shfl_sync(0xFFFFFFFFu, entry.steps_after, 31);
  return last;
}

// The group of block `index`; a whole warp asks for the same one.
__device__ inline GroupSpan group_of_block(const int64_t* offsets, int groups, int rows,
                                           int index) {
  GroupLane before{};
  for (int base = 0; base < groups; base += 32) {
    const GroupLane entry = group_lane(offsets, groups, rows, base, before);
    const unsigned holders = __ballot_sync(0xFFFFFFFFu, index < entry.blocks_after);
    if (holders != 0) {
      const int lane = __ffs(holders) - 1;
      return {base + lane, __shfl_sync(0xFFFFFFFFu, entry.start, lane),
              __shfl_sync(0xFFFFFFFFu, entry.end, lane),
              __shfl_sync(0xFFFFFFFFu, entry.blocks_before, lane),
              __shfl_sync(0xFFFFFFFFu, entry.steps_before, lane)};
    }
    before = last_lane(entry);
  }
  return {groups, before.end, rows, before.blocks_after, before.steps_after};
}

}  // namespace fp8core
