// How many warps share a row, and how many rows a block of threads works on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "statistics.cuh"

namespace fp8core {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Teams of `warps` warps, as many to a block as make up about `threads` threads. A team holds a row
// in `vectors` vectors a lane, unless that takes more than `most` threads.
struct TeamShape {
  int warps, teams;

  TeamShape(int64_t cols, int vectors, int threads, int most = 1024)
      : warps(static_cast<int>(std::min<int64_t>(ceil_div(num_chunks(cols), vectors), most / 32))),
        teams(std::max(1, threads / 32 / warps)) {}
  int block_warps() const { return warps * teams; }
  dim3 threads() const { return dim3(32 * warps, teams); }

  // Blocks that are on the device at once and share the rows evenly.
  unsigned grid(int64_t rows, int resident) const {
    const int64_t rows_of_team = ceil_div(rows, static_cast<int64_t>(resident) * teams);
    return static_cast<unsigned>(ceil_div(rows, rows_of_team * teams));
  }
};

}  // namespace fp8core
