// Division by a number that a whole launch shares: a product and a shift.
#pragma once

#include <cstdint>

namespace fp8core {

// quotient(n) = n / divisor for n and divisor below 2^31.
//
//     n / d = n m / 2^(32 + shift),  m = ceil(2^(32 + shift) / d),  2^shift < d <= 2^(shift + 1)
//
// m d exceeds 2^(32 + shift) by less than d <= 2^(shift + 1), so n m / 2^(32 + shift) exceeds n / d
// by less than n 2^(shift + 1) / (d 2^(32 + shift)) < 1 / d, which does not reach the next integer.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(std::uint32_t divisor) : divisor_(divisor) {
    if (divisor == 1) return;
    while ((std::uint64_t{2} << shift_) < divisor) ++shift_;
    const std::uint64_t power = std::uint64_t{1} << (32 + shift_);
    multiplier_ = static_cast<std::uint32_t>((power + divisor - 1) / divisor);
  }
  __device__ std::uint32_t quotient(std::uint32_t n) const {
    return divisor_ == 1 ? n : __umulhi(n, multiplier_) >> shift_;
  }
  __device__ std::uint32_t remainder(std::uint32_t n, std::uint32_t quotient) const {
    return n - quotient * divisor_;
  }

 private:
  std::uint32_t divisor_ = 1, multiplier_ = 0;
  int shift_ = 0;
};

}  // namespace fp8core
