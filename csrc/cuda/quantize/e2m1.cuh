// e2m1 codes: to the nearest, or stochastically with the noise that docs/numerics.md defines.
#pragma once

#include <cstdint>

namespace fp8core {

// A value on its way to e2m1, whose magnitudes are 0 .5 1 1.5 2 | 3 4 | 6. Within a binade the step
// is half the power of two below, so a sum with 2^22 times that power has the multiple n of the step
// as its last bits; n plus twice the power's exponent is the code:
//
//     0 .. 2: step .5, n 0 .. 4, code n     2 .. 4: step 1, n 2 .. 4, code n + 2
//     4 .. 6: step 2, n 2 .. 3, code n + 4
//
// n and its code are even together, so ties to even n are ties to even codes. What is beyond 6 is 6,
// NaN too: fminf drops it.
struct ToE2M1 {
  float value;
  uint32_t power;  // of two, as bits of a float: 1, 2 or 4

  __device__ explicit ToE2M1(float x) : value(fmaxf(fminf(x, 6.0f), -6.0f)) {
    power = max(__float_as_uint(value) & 0x7F800000u, 0x3F800000u);
  }
  __device__ float magic() const { return __uint_as_float(power + (22u << 23)); }
  __device__ uint32_t code(uint32_t n) const {
    // power >> 22 is 254 for 1, 256 for 2, 258 for 4
    return ((n + (power >> 22) + 2) & 7) | (__float_as_uint(value) >> 28 & 8);
  }
};

__device__ inline uint32_t e2m1_nearest(float x) {
  const ToE2M1 to(x);
  return to.code(__float_as_uint(__fadd_rn(fabsf(to.value), to.magic())));
}

// `noise` in (0, 1). Every step here is exact but the first, which cuts off.
__device__ inline uint32_t e2m1_stochastic(float x, float noise) {
  const ToE2M1 to(x);
  const float magnitude = fabsf(to.value), magic = to.magic();
  const float sum = __fadd_rz(magnitude, magic);
  const float rest = magnitude - (sum - magic);
  const float step = __uint_as_float(to.power - (1u << 23));
  return to.code(__float_as_uint(sum) + (__fmul_rn(noise, step) < rest ? 1 : 0));
}

// Four words of 32 random bits a counter. Source: Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011, sec. 3.3: Philox4x32-10.
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

// (r + 0.5) / 2^16 of the low or high half of a word: r.1 lies behind the leading 1 of [1, 2).
__device__ inline float noise_of(uint32_t word, bool is_high) {
  const uint32_t r = (is_high ? word >> 9 : word << 7) & 0x007FFF80u;
  return __uint_as_float(0x3F800040u | r) - 1.0f;
}

}  // namespace fp8core
