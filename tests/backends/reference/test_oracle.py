"""Quantize and dequantize against loops over numpy scalars and the casts of ml_dtypes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.backend_api import DequantizeDesc, Operand, OperandSpec, QuantizeDesc
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
F32 = np.float32
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
SPECS = (
    OperandSpec("e4m3", (0, 0), 448.0),
    OperandSpec("e5m2", (1, 0), 57344.0),
    OperandSpec("e4m3", (1, 8), 448.0, power_of_two=True),
    OperandSpec("e4m3", (4, 4), 448.0),
    OperandSpec("e5m2", (2, 6), 30000.0, amax_epsilon=0.5),
    OperandSpec("e2m1", (3, 5), 6.0),
    OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
    OperandSpec("e2m1", (4, 8), 6.0, scale_format="e8m0"),
    OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3"),
    OperandSpec("e2m1", (16, 16), 6.0, scale_format="e4m3"),
    OperandSpec("e4m3", (2, 4), 448.0, scale_format="e4m3"),
)


def encode(format: str, value: np.float32) -> int:
    dtype = ML_DTYPES[format]
    largest = F32(ml_dtypes.finfo(dtype).max)
    clipped = np.array([min(max(value, -largest), largest)], dtype=F32)
    return int(clipped.astype(dtype).view(np.uint8)[0]) & (15 if format == "e2m1" else 255)


def decode(format: str, code: int) -> np.float32:
    return F32(np.array([code], dtype=np.uint8).view(ML_DTYPES[format])[0])


def power_of_two_down(value: np.float32) -> np.float32:
    return F32(2.0 ** (np.frexp(value)[1] - 1))


def scale_of_block(
    spec: OperandSpec, amax: np.float32, tensor_amax: np.float32
) -> tuple[np.float32, np.float32 | int, np.float32 | None]:
    """The multiplier of a block, its stored scale and the global one: numerics.md 3.2 to 3.5.

    For finite x whose scales are in float32's normal range.
    """
    one, target = F32(1), F32(spec.target)
    if spec.scale_format == "e8m0":
        wanted = amax * (F32(1 / spec.target))
        byte = next(b for b in range(255) if decode("e8m0", b) >= wanted)
        return one / decode("e8m0", byte), byte, None
    if spec.scale_format == "e4m3":
        s_enc = F32(448 * spec.target) / tensor_amax if tensor_amax > 0 else one
        byte = encode("e4m3", amax * (s_enc * F32(1 / spec.target)))
        with np.errstate(divide="ignore"):
            multiplier = one / (decode("e4m3", byte) * (one / s_enc))
        return min(multiplier, np.finfo(F32).max), byte, one / s_enc
    amax = max(amax, F32(spec.amax_epsilon))
    scale = target / amax if amax > 0 else one
    scale = power_of_two_down(scale) if spec.power_of_two else scale
    return scale, one / scale, None


def slow_quantize(
    spec: OperandSpec, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.float32 | None]:
    """Codes, stored scales and the global scale of ``x [rows, k]``, which is not empty."""
    (rows, k), (br, bk) = x.shape, spec.block
    br, bk = br or rows, bk or k
    codes = np.zeros((rows, k), dtype=np.uint8)
    scale_dtype = F32 if spec.scale_format == "float32" else np.uint8
    stored = np.zeros((math.ceil(rows / br), math.ceil(k / bk)), dtype=scale_dtype)
    tensor_amax = np.abs(x).max()
    for i, j in np.ndindex(stored.shape):
        top, left = i * br, j * bk
        amax = np.abs(x[top : top + br, left : left + bk]).max()
        multiplier, stored[i, j], global_scale = scale_of_block(spec, amax, tensor_amax)
        for r, c in itertools.product(
            range(top, min(top + br, rows)), range(left, min(left + bk, k))
        ):
            codes[r, c] = encode(spec.format, x[r, c] * multiplier)
    if spec.format == "e2m1":  # element 2 i in the low half of byte i
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes, stored, global_scale


def slow_dequantize(spec: OperandSpec, operand: Operand) -> np.ndarray:
    data, scales = operand.data.numpy(), operand.scale_inv.numpy()
    if spec.format == "e2m1":
        data = np.stack((data & 15, data >> 4), -1).reshape(len(data), 2 * data.shape[1])
    values = np.zeros(data.shape, dtype=F32)
    for r, c in np.ndindex(data.shape):
        scale = scales[r // (spec.block[0] or len(data)), c // (spec.block[1] or data.shape[1])]
        if spec.scale_format != "float32":
            scale = decode(spec.scale_format, scale)
        if operand.global_scale_inv is not None:
            scale = scale * F32(operand.global_scale_inv.item())
        values[r, c] = decode(spec.format, data[r, c]) * scale
    return values


def tensor(seed: int, rows: int, cols: int) -> torch.Tensor:
    """Six decades with zeros among them: every scale stays in float32's normal range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= 10.0 ** (6 * torch.rand(rows, cols, generator=generator) - 3)
    return x.masked_fill_(torch.rand(rows, cols, generator=generator) < 0.2, 0.0)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 19), cols=st.integers(1, 20))
def test_quantize_equals_the_loops(spec: OperandSpec, seed: int, rows: int, cols: int) -> None:
    step = 2 if spec.format == "e2m1" else 1
    x = tensor(seed, rows * step, cols * step)
    made = ReferenceBackend().bind(QuantizeDesc(x.dtype, spec, spec), CPU)(x)
    for operand, source in zip(made, (x, x.t()), strict=True):
        data, scales, global_scale = slow_quantize(spec, source.numpy())
        assert np.array_equal(operand.data.numpy(), data)
        assert np.array_equal(operand.scale_inv.numpy(), scales)
        if global_scale is not None:
            assert operand.global_scale_inv.tolist() == [[global_scale]]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), rows=st.integers(0, 19), cols=st.integers(0, 20))
def test_dequantize_equals_the_loops(spec: OperandSpec, seed: int, rows: int, cols: int) -> None:
    step = 2 if spec.format == "e2m1" else 1
    x = tensor(seed, rows * step, cols * step)
    backend = ReferenceBackend()
    for operand in backend.bind(QuantizeDesc(x.dtype, spec, spec), CPU)(x):
        made = backend.bind(DequantizeDesc(spec), CPU)(operand)
        assert made.dtype == torch.float32
        assert np.array_equal(made.numpy(), slow_dequantize(spec, operand))


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
def test_dequantize_decodes_every_code(format: str) -> None:
    spec = OperandSpec(format, (1, 0), 1.0)
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    operand = Operand(codes, torch.linspace(0.5, 2.0, 16)[:, None])
    made = ReferenceBackend().bind(DequantizeDesc(spec), CPU)(operand)
    assert np.array_equal(made.numpy(), slow_dequantize(spec, operand), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_rounds_once_from_float32(dtype: torch.dtype) -> None:
    spec = replace(SPECS[0], block=(1, 0))
    x = tensor(3, 40, 50)
    backend = ReferenceBackend()
    operand = backend.bind(QuantizeDesc(x.dtype, spec, None), CPU)(x).rowwise
    made = backend.bind(DequantizeDesc(spec, dtype), CPU)(operand)
    numpy_dtype = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}[dtype]
    expected = slow_dequantize(spec, operand).astype(numpy_dtype)
    assert made.dtype == dtype
    assert np.array_equal(made.float().numpy(), expected.astype(F32))


def test_dequantize_of_a_mantissa_tie_goes_to_even() -> None:
    # 1.0 * (1 + 2^-8) lies halfway between the bfloat16 1 and 1 + 2^-7; a hair more goes up.
    spec = replace(SPECS[0], block=(1, 0))
    tie = 1 + 2.0**-8
    operand = Operand(
        torch.full((2, 1), 0x38, dtype=torch.uint8), torch.tensor([[tie], [tie + 2.0**-20]])
    )
    made = ReferenceBackend().bind(DequantizeDesc(spec, torch.bfloat16), CPU)(operand)
    assert made.tolist() == [[1.0], [1 + 2.0**-7]]


def test_dequantize_writes_no_input() -> None:
    spec = SPECS[0]
    operand = Operand(torch.arange(6, dtype=torch.uint8).reshape(2, 3), torch.tensor([[0.5]]))
    before = [part.clone() for part in operand[:2]]
    ReferenceBackend().bind(DequantizeDesc(spec), CPU)(operand).fill_(7.0)
    assert all(map(torch.equal, operand[:2], before))
