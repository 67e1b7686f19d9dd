// Sums that the blocks of a cluster hand to each other. A block has all of them when as many bytes
// as it expects have come, which the hardware counts at a barrier in its shared memory: no block
// waits until its other writes, of codes, have reached memory, as it would at the cluster's
// barrier.
//
// A block alone stores its sums itself and meets at its own barrier: such stores with a count are
// for clusters of two blocks and more.
//
// Two buffers take turns. A block writes to one for the second time after it has all sums in the
// other, which every block sends after it has read those in the first.
#pragma once

#include "../cluster.cuh"

namespace fp8core {

class Exchange {
 public:
  // `buffers` are two of `floats` each, which take `sums` sums in an exchange; `barriers` are two.
  // All threads of the cluster meet at its barrier before the first exchange.
  __device__ Exchange(float* buffers, uint64_t* barriers, int floats, int sums)
      : buffers_(buffers),
        barriers_(barriers),
        floats_(floats),
        sums_(sums),
        is_alone_(cluster_blocks() == 1) {
    if (threadIdx.x != 0 || is_alone_) return;
    init_barrier(barriers);
    init_barrier(barriers + 1);
  }
  __device__ void begin() const {
    if (threadIdx.x == 0 && !is_alone_) expect_bytes(barriers_ + turn(), sums_ * 4);
  }
  // Gives block `rank` the sum at index `at`. Over all blocks each index is given once.
  __device__ void give(int at, unsigned rank, float sum) const {
    float* to = buffers_ + turn() * floats_ + at;
    if (is_alone_)
      *to = sum;
    else
      store_in_block(to, barriers_ + turn(), rank, sum);
  }
  // Waits for all sums, which stay until the next exchange but one. For all threads of the block.
  __device__ const float* take() {
    const unsigned now = turn();
    if (is_alone_)
      __syncthreads();
    else
      wait_for_bytes(barriers_ + now, count_ / 2 % 2);
    ++count_;
    return buffers_ + now * floats_;
  }

 private:
  __device__ unsigned turn() const { return count_ % 2; }

  float* const buffers_;
  uint64_t* const barriers_;
  const int floats_, sums_;
  const bool is_alone_;
  unsigned count_ = 0;  // exchanges that have ended
};

}  // namespace fp8core
