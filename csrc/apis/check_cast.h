// Checks that several casts share.
#pragma once

#include "../cuda/quantize/casts.h"

namespace fp8core {

inline bool is_empty(const Matrix& x) { return x.rows == 0 || x.cols == 0; }

inline void check(const Matrix& x) {
  FP8CORE_CHECK(x.rows >= 0 && x.cols >= 0 && x.stride >= x.cols, "x is ", x.rows, " x ", x.cols,
                " with ", x.stride, " elements between rows; expected at least ", x.cols);
  if (!is_empty(x)) FP8CORE_CHECK_ADDRESS(x.data, "x [", x.rows, ", ", x.cols, "]");
}

inline void check_grid(const char* entry, std::int64_t tiles) {
  FP8CORE_CHECK(tiles < (std::int64_t{1} << 31), entry, ": ", tiles,
                " tiles of 128 x 128, more than a grid takes");
}

}  // namespace fp8core
