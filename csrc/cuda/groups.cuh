// Groups of rows whose offsets are on the device: which group a block of 128 rows belongs to.
//
// Blocks are counted group by group, so that none reaches into the next group:
//
//     block of group g = sum over the groups before of ceil(size / 128), and on
//
// Behind the last group lies the tail: rows that belong to none. All blocks there are, the tail's
// included, number at most rows / 128 + groups + 1. Offsets may hold anything: they are cut off at
// 0 and at the rows, and never lead back.
#pragma once

#include <cstdint>

namespace fp8core {

constexpr int kGroupBlock = 128;

struct GroupPlace {
  int group;        // the number of groups for the tail
  int start, end;   // rows
  int first_block;  // of the group
};

__device__ inline int clamp_offset(int64_t offset, int rows) {
  return static_cast<int>(offset < 0 ? 0 : offset > rows ? rows : offset);
}

// 32 groups, one a lane: what `lane` has to know of group base + lane.
struct GroupLane {
  int start, end;
  int blocks_before, blocks_after;  // blocks of all groups up to this one, without and with it
};

__device__ inline GroupLane group_lane(const int64_t* offsets, int groups, int rows, int base,
                                       int end_before, int blocks_before) {
  const int lane = threadIdx.x % 32, group = base + lane;
  int end = group < groups ? clamp_offset(offsets[group + 1], rows) : 0;
  end = max(end, end_before);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, end, step);
    if (lane >= step) end = max(end, other);
  }
  int start = __shfl_up_sync(0xFFFFFFFFu, end, 1);
  if (lane == 0) start = end_before;
  const int own = (end - start + kGroupBlock - 1) / kGroupBlock;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  sum += blocks_before;
  return {start, end, sum - own, sum};
}

// The group of block `index`; a whole warp asks for the same one.
__device__ inline GroupPlace group_of_block(const int64_t* offsets, int groups, int rows,
                                            int index) {
  int end = 0, blocks = 0;
  for (int base = 0; base < groups; base += 32) {
    const GroupLane own = group_lane(offsets, groups, rows, base, end, blocks);
    const unsigned found = __ballot_sync(0xFFFFFFFFu, index < own.blocks_after);
    if (found != 0) {
      const int lane = __ffs(found) - 1;
      return {base + lane, __shfl_sync(0xFFFFFFFFu, own.start, lane),
              __shfl_sync(0xFFFFFFFFu, own.end, lane),
              __shfl_sync(0xFFFFFFFFu, own.blocks_before, lane)};
    }
    end = __shfl_sync(0xFFFFFFFFu, own.end, 31);
    blocks = __shfl_sync(0xFFFFFFFFu, own.blocks_after, 31);
  }
  return {groups, end, rows, blocks};
}

}  // namespace fp8core
