// What the entries find out about their arguments.
#pragma once

#include <array>
#include <atomic>

#include "fp8core/check.h"
#include "fp8core/microscaling.h"

namespace fp8core {

inline int num_multiprocessors(int device) {
  static std::array<std::atomic<int>, 64> known{};
  const bool is_kept = device >= 0 && device < static_cast<int>(known.size());
  int count = is_kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    FP8CORE_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    if (is_kept) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

inline std::int64_t bytes_of(InputType type) { return type == InputType::kFloat32 ? 4 : 2; }

inline bool is_aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Every row of x begins at a multiple of 16 bytes, and holds whole vectors of 8 elements.
inline bool reads_vectors(const Matrix& x) {
  return is_aligned(x.data, 16) && x.cols % 8 == 0 && x.stride * bytes_of(x.type) % 16 == 0;
}

inline void check(const Matrix& x) {
  FP8CORE_CHECK(x.rows >= 0 && x.cols >= 0 && x.stride >= x.cols, "x is ", x.rows, " x ", x.cols,
                " with ", x.stride, " elements between rows; expected at least ", x.cols);
  if (x.rows > 0 && x.cols > 0) FP8CORE_CHECK_ADDRESS(x.data, "x [", x.rows, ", ", x.cols, "]");
}

// `rows` of the operand, `block_rows` under one scale; the grid has `tiles` blocks.
inline void check_byte_scaled(const ByteScaled& out, std::int64_t rows, std::int64_t block_rows,
                              std::int64_t tiles) {
  if (out.codes == nullptr) return;
  const std::int64_t least = ((rows + block_rows - 1) / block_rows + 15) / 16 * 16;
  FP8CORE_CHECK(out.scales != nullptr && is_aligned(out.scales, 16) && out.pitch >= least &&
                    out.pitch % 16 == 0,
                "scales of ", rows, " rows have a pitch of ", out.pitch,
                " bytes; expected a multiple of 16 from ", least, " on, at such an address");
  FP8CORE_CHECK(tiles < (std::int64_t{1} << 31), "quantize: ", tiles,
                " tiles of 128 x 128, more than a grid takes");
}

}  // namespace fp8core
