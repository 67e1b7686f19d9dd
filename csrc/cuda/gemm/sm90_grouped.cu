// The grouped products of two formats. backends/cuda/build.py compiles this file once for each
// pair, side by side: FP8CORE_A and FP8CORE_B name the enumerators of Format.
#include "sm90_grouped.cuh"

#if !defined(FP8CORE_A) || !defined(FP8CORE_B)
#error "compile with -DFP8CORE_A=kE4M3 or kE5M2, and -DFP8CORE_B likewise"
#endif

namespace fp8core {

template void launch_grouped<Format::FP8CORE_A, Format::FP8CORE_B>(const GroupedParams&,
                                                                   const GroupedLaunch&,
                                                                   cudaStream_t);

}  // namespace fp8core
