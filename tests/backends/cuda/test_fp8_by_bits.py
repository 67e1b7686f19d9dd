"""Codes of FP8 without instructions for them, as on GPUs before compute capability 8.9: csrc's own
functions, compiled for this machine's processor, against torch's casts."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from fp8core_backends.cuda import build

HEADERS = {
    "cuda_fp16.h": """
        #include <cmath>
        #include <cstdint>
        #include <cstring>
        #define __device__
        #define __CUDA_ARCH__ 800
        using std::isnan;
        struct __half2 { std::uint32_t bits; };
        inline __half2 __floats2half2_rn(float, float) { return {0}; }
        inline float __fadd_rn(float a, float b) { return a + b; }
        inline float __fmul_rn(float a, float b) { return a * b; }
        inline std::uint32_t __float_as_uint(float value) {
          std::uint32_t bits; std::memcpy(&bits, &value, 4); return bits;
        }
        inline float __uint_as_float(std::uint32_t bits) {
          float value; std::memcpy(&value, &bits, 4); return value;
        }
    """,
    "fp8core/quantize.h": "namespace fp8core { enum class Format { kE4M3, kE5M2 }; }",
}
SOURCE = """
    #include <cstddef>
    #include "fp8.cuh"
    using namespace fp8core;
    extern "C" void e4m3(const float* x, std::uint8_t* codes, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i)
        codes[i] = static_cast<std::uint8_t>(encode2<Format::kE4M3>(x[i], 0.0f));
    }
    extern "C" void e5m2(const float* x, std::uint8_t* codes, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i)
        codes[i] = static_cast<std::uint8_t>(encode2<Format::kE5M2>(0.0f, x[i]) >> 8);
    }
    extern "C" void values(float* of_e4m3, std::uint32_t* of_e5m2) {
      for (std::uint32_t code = 0; code < 256; ++code) {
        of_e4m3[code] = e4m3_value(code);
        of_e5m2[code] = decode2_into_halves<Format::kE5M2>(code | (255 - code) << 8);
      }
    }
"""
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fp8")
    for name, text in HEADERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "codes.cpp").write_text(SOURCE)
    made = folder / "codes.so"
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    includes = [f"-I{folder}", f"-I{build.sources() / 'cuda'}"]
    subprocess.run([compiler, *options, *includes, folder / "codes.cpp", "-o", made], check=True)
    return ctypes.CDLL(str(made))


def hostile() -> torch.Tensor:
    """Return every float of 16 bits, its neighbours in float32, and floats of any bits."""
    tops = torch.arange(2**16, dtype=torch.int64) << 16
    around = torch.cat([tops + step for step in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001)])
    anywhere = torch.randint(2**32, (1_000_000,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([around, anywhere]) % 2**32
    return (bits - (bits >= 2**31) * 2**32).int().view(torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_saturated_values(name: str, library: ctypes.CDLL) -> None:
    dtype, largest = FORMATS[name]
    x = hostile()
    codes = torch.empty(x.shape, dtype=torch.uint8)
    getattr(library, name)(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, codes)), ctypes.c_size_t(len(x))
    )
    expected = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    torch.testing.assert_close(codes, torch.where(x.isnan(), 0x7F, expected), rtol=0, atol=0)


def test_values_are_those_of_the_formats(library: ctypes.CDLL) -> None:
    of_e4m3, halves = torch.empty(256), torch.empty(256, dtype=torch.int32)
    library.values(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (of_e4m3, halves)))
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(of_e4m3, expected, rtol=0, atol=0, equal_nan=True)
    pairs = halves.view(torch.float16).view(256, 2).float()
    of_e5m2 = codes.view(torch.float8_e5m2).float()
    expected = torch.stack((of_e5m2, of_e5m2.flip(0)), 1)
    torch.testing.assert_close(pairs, expected, rtol=0, atol=0, equal_nan=True)
