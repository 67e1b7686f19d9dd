// Groups of rows whose offsets are on the device: which group a block of 128 rows belongs to.
//
// Blocks are counted group by group, so that none reaches into the next group:
//
//     block of group g = sum over the groups before of ceil(size / 128), and on
//
// In codes along k each group begins at a multiple of kGroupStep, with zeros up to there.
//
// Behind the last group lies the tail: rows that belong to none. All blocks there are, the tail's
// included, number at most rows / 128 + groups + 1. Offsets may hold anything: they are cut off at
// 0 and at the rows, and never lead back.
#pragma once

#include <cstdint>

#include "fp8core/quantize.h"

namespace fp8core {

constexpr int kGroupBlock = 128;

struct GroupPlace {
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

// 32 groups, one a lane: what `lane` has to know of group base + lane.
struct GroupLane {
  int start, end;
  int blocks_before, blocks_after;  // blocks of all groups up to this one, without and with it
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
  const int own = (end - start + kGroupBlock - 1) / kGroupBlock,
            own_steps = group_steps(end - start);
  int blocks = own, steps = own_steps;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, blocks, step);
    const int other_steps = __shfl_up_sync(0xFFFFFFFFu, steps, step);
    if (lane >= step) blocks += other, steps += other_steps;
  }
  blocks += before.blocks_after;
  steps += before.steps_after;
  return {start, end, blocks - own, blocks, steps - own_steps, steps};
}

// What the last lane knows, for the 32 groups behind.
__device__ inline GroupLane last_lane(const GroupLane& own) {
  GroupLane last{};
  last.end = __shfl_sync(0xFFFFFFFFu, own.end, 31);
  last.blocks_after = __shfl_sync(0xFFFFFFFFu, own.blocks_after, 31);
  last.steps_after = __shfl_sync(0xFFFFFFFFu, own.steps_after, 31);
  return last;
}

// The group of block `index`; a whole warp asks for the same one.
__device__ inline GroupPlace group_of_block(const int64_t* offsets, int groups, int rows,
                                            int index) {
  GroupLane before{};
  for (int base = 0; base < groups; base += 32) {
    const GroupLane own = group_lane(offsets, groups, rows, base, before);
    const unsigned found = __ballot_sync(0xFFFFFFFFu, index < own.blocks_after);
    if (found != 0) {
      const int lane = __ffs(found) - 1;
      return {base + lane, __shfl_sync(0xFFFFFFFFu, own.start, lane),
              __shfl_sync(0xFFFFFFFFu, own.end, lane),
              __shfl_sync(0xFFFFFFFFu, own.blocks_before, lane),
              __shfl_sync(0xFFFFFFFFu, own.steps_before, lane)};
    }
    before = last_lane(own);
  }
  return {groups, before.end, rows, before.blocks_after, before.steps_after};
}

}  // namespace fp8core
