// Instructions of Hopper, one function each: barriers in shared memory, the copy engine, and the
// products of warpgroups. Source: PTX ISA 9.0, 9.7.13 (mbarrier), 9.7.9.25 (cp.async.bulk.tensor),
// 9.7.15 (wgmma).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fp8core/quantize.h"

namespace fp8core::sm90 {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_barrier(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialized barriers known to the copy engine.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes this thread's writes to shared memory known to the copy engine and the tensor cores.
__device__ inline void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void wait(uint64_t* barrier, unsigned phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and has the barrier wait for `bytes` of the copy engine besides.
__device__ inline void arrive_expecting(uint64_t* barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives when the copies that this thread has begun by copy_word are done.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Copies four bytes, or writes zeros.
__device__ inline void copy_word(float* to, const float* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_there ? 4 : 0)
               : "memory");
}

// Copies the box of a tensor map that begins at (x, y) to `to`; zeros where the tensor ends.
__device__ inline void copy_box(const CUtensorMap* map, uint64_t* barrier, void* to, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier of some of a block's threads: `threads` arrive at barrier `number`.
__device__ inline void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at such a barrier, without waiting.
__device__ inline void pass(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// A tile of rows of 128 bytes, swizzled in 128 bytes, that begins at a multiple of 1024: eight rows
// are 1024 bytes apart from the next eight. Source: PTX ISA 9.0, 9.7.15.5.1 (matrix descriptor).
__device__ inline uint64_t matrix_descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kStride | uint64_t{1} << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of `d` over the wait for it.
template <int kCount>
__device__ inline void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64, 128] = a[64, 32] @ b[128, 32].T, plus d if `adds`, of the warpgroup. Thread t holds rows
// 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1): d[4 j], d[4 j + 1] of the first
// row, d[4 j + 2], d[4 j + 3] of the other.
#define FP8CORE_WGMMA(a_type, b_type)                                                              \
  asm volatile(                                                                                    \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." a_type "." b_type                             \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"             \
      "}, %64, %65, adds, 1, 1;\n}\n"                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

template <Format A, Format B>
__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  static_assert(A == Format::kE4M3 || B == Format::kE4M3);
  if constexpr (A == B)
    FP8CORE_WGMMA("e4m3", "e4m3");
  else if constexpr (A == Format::kE5M2)
    FP8CORE_WGMMA("e5m2", "e4m3");
  else
    FP8CORE_WGMMA("e4m3", "e5m2");
}
#undef FP8CORE_WGMMA

}  // namespace fp8core::sm90
