// e2m1 codes: to the nearest, or stochastically with the noise that docs/numerics.md defines.
//
// The magnitudes of e2m1 are 0 .5 1 1.5 2 | 3 4 | 6, codes 0 to 7: between them the code is linear
// in the magnitude m, in three pieces
//
//     code = 4 t1 + 2 t2 + t3     t1 = sat(m / 2), t2 = sat(m / 2 - 1), t3 = sat(m / 2 - 2)
//
// Each term is exact, and all but the one of the piece that m lies in are whole numbers. So to
// round m is to round the sum to a whole number: it is added, term by term, to a float whose last
// bit counts 1. Of two neighbours one has an even code, so ties go to the even code, as e2m1 asks.
// sat limits magnitudes to 6.
//
// These functions return `code << 1 | sign` in each nibble, which saves one instruction a value;
// `settled` moves the sign to the highest bit.
#pragma once

#include <cstdint>

namespace fp8core {

// Adds the code of m to `start`; the rounding is that of `add(a, b, c)` = a * b + c.
template <typename Add>
__device__ float add_code(float value, float start, Add add) {
  const float m = fminf(fabsf(value), 6.0f);  // drops NaN
  const float t1 = __saturatef(m * 0.5f), t2 = __saturatef(fmaf(m, 0.5f, -1.0f));
  const float t3 = __saturatef(fmaf(m, 0.5f, -2.0f));
  return add(t3, 1.0f, add(t2, 2.0f, add(t1, 4.0f, start)));
}

// `code << 1 | sign of value`. `value` is a product, which is never a negative NaN.
__device__ inline uint32_t with_sign(uint32_t code, float value) {
  return __funnelshift_l(__float_as_uint(value), code, 1);
}

// Four values, the first in the lowest nibble of 16 bits; the upper 16 bits are undefined.
__device__ inline uint32_t e2m1_nearest(const float (&v)[4]) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const float sum =
        add_code(v[i], 0x1p23f, [](float a, float b, float c) { return fmaf(a, b, c); });
    packed = packed * 16 + with_sign(__float_as_uint(sum), v[i]);  // the exponent is above bit 23
  }
  return packed;
}

// The same with 16 random bits a value, in the order of `low` and `high`: floor(code + (r + .5) /
// 2^16). The last bit of a float from 8 to 16 is 2^-20, so truncation is finer than the noise.
//     8 + noise:  0 10000010 000rrrr rrrrrrrr rrrr1000     sum:  0 10000010 ccc.....
__device__ inline uint32_t e2m1_stochastic(const float (&v)[4], uint32_t low, uint32_t high) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const uint32_t word = i < 2 ? low : high;
    const uint32_t r = (i % 2 == 0 ? word << 4 : word >> 12) & 0x000FFFF0u;
    const float sum = add_code(v[i], __uint_as_float(0x41000008u | r),
                               [](float a, float b, float c) { return __fmaf_rz(a, b, c); });
    packed = packed * 16 + with_sign(__float_as_uint(sum) >> 20, v[i]);
  }
  return packed - 0x820u * 0x1111u;  // the exponent, 0x410 before the sign
}

// code << 1 | sign -> sign << 3 | code, in each nibble.
__device__ inline uint32_t settled(uint32_t packed) {
  return (packed >> 1 & 0x77777777u) | (packed << 3 & 0x88888888u);
}

// Four random words of 32 bits for a counter. Source: Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011, sec. 3.3: Philox4x32-10.
__device__ inline uint4 philox(uint4 c, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{c.x} * 0xD2511F53u, p1 = uint64_t{c.z} * 0xCD9E8D57u;
    c = make_uint4(static_cast<uint32_t>(p1 >> 32) ^ c.y ^ key.x, static_cast<uint32_t>(p1),
                   static_cast<uint32_t>(p0 >> 32) ^ c.w ^ key.y, static_cast<uint32_t>(p0));
    key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
  }
  return c;
}

}  // namespace fp8core
