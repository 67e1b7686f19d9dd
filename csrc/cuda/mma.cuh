// Products of a warp's tensor core in 16 bits, added in float32, and their operands in shared
// memory. Source: PTX ISA 9.0, 9.7.14.5.8 (mma.m16n8k16), 9.7.14.5.15 (ldmatrix). Thread t holds
//
//     of a [16, 16]   rows t / 4 (0, 2) and t / 4 + 8 (1, 3), columns 2 (t % 4) (+ 1), 8 on in 2, 3
//     of b [8, 16]    row t / 4, columns 2 (t % 4) (+ 1), and 8 on
//     of d [16, 8]    rows t / 4 (0, 1) and t / 4 + 8 (2, 3), columns 2 (t % 4) (+ 1)
#pragma once

#include <cstdint>

namespace fp8core {

// d[16, 8] += a[16, 16] @ b[8, 16].T, of bfloat16 or of float16.
#define FP8CORE_MMA(type)                                               \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type            \
      ".f32 "                                                           \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <bool kIsBFloat16>
__device__ void multiply(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  if constexpr (kIsBFloat16)
    FP8CORE_MMA("bf16");
  else
    FP8CORE_MMA("f16");
}
#undef FP8CORE_MMA

// Four matrices of 8 rows of 16 bytes each: lane l is given the address of row l % 8 of matrix
// l / 8, and gets two adjacent elements of row l / 4 of each; transposed, of column l / 4.
#define FP8CORE_LOAD_MATRICES(how)                                                       \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0, %1, %2, %3}, [%4];" \
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])          \
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))          \
               : "memory")
__device__ inline void load_matrices(std::uint32_t (&words)[4], const void* row) {
  FP8CORE_LOAD_MATRICES("");
}
__device__ inline void load_transposed(std::uint32_t (&words)[4], const void* row) {
  FP8CORE_LOAD_MATRICES(".trans");
}
#undef FP8CORE_LOAD_MATRICES

}  // namespace fp8core
