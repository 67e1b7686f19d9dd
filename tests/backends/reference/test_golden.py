"""Quantization bit for bit against the vectors of other libraries; see golden/README.md."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec, Quantized, QuantizeDesc
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")

TE_INPUTS = (
    *("normal.bf16", "normal.fp16", "normal.fp32", "wide.bf16", "zeros.bf16", "zero_blocks.bf16"),
    *("outlier.bf16", "inf.bf16", "nan.bf16", "tiny.bf16", "tiny.fp32", "odd.bf16"),
)
MX_INPUTS = ("normal.bf16", "wide.bf16", "zero_blocks.bf16")
INPUTS = {
    "delayed": TE_INPUTS,
    "current": TE_INPUTS,
    "block1d": TE_INPUTS,
    "block2d": TE_INPUTS,
    "mxfp8": MX_INPUTS,
    "nvfp4": (*MX_INPUTS, "outlier.bf16"),
}
FILES = {"mxfp8": "mxfp8_seed0", "nvfp4": "nvfp4_seed0"}  # the others are in quantize_seed0
CASES = [(family, name) for family, names in INPUTS.items() for name in names]
NUM_ARRAYS = {
    "delayed": 144,
    "current": 128,
    "block1d": 136,
    "block2d": 136,
    "mxfp8": 24,
    "nvfp4": 48,
}
NUM_GLOBAL_AMAXES = 24

# OCP's floor rule of the MX scale is no recipe of this library: kept in the file for comparison.
FLOOR_RULE = {"floor_rowwise_data", "floor_rowwise_scale"}
# The file holds the amax, the operand the scale made from it: compared by a test of its own.
GLOBAL_AMAXES = {"global_amax_row", "global_amax_col"}

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def files(golden: Callable[[str], Arrays]) -> dict[str, Arrays]:
    return {name: golden(name) for name in ("quantize_seed0", *FILES.values())}


def arrays_of(files: dict[str, Arrays], family: str) -> Arrays:
    return files[FILES.get(family, "quantize_seed0")]


def vectors(arrays: Arrays, family: str, name: str) -> Arrays:
    """The arrays that the quantization of one input is compared with."""
    return {
        key: array
        for key, array in arrays.items()
        if key.startswith(f"{family}/{name}/")
        and key.rpartition("/")[2] not in FLOOR_RULE | GLOBAL_AMAXES
    }


def as_input(array: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(array)
    return x.view(torch.bfloat16) if array.dtype == np.uint16 else x


def quantize(
    x: torch.Tensor, row: OperandSpec, column: OperandSpec, **given: torch.Tensor
) -> Quantized:
    return ReferenceBackend().bind(QuantizeDesc(x.dtype, row, column), CPU)(x, **given)


def delayed(x: torch.Tensor, words: list[str]) -> dict[str, torch.Tensor]:
    spec = OperandSpec(words[0], (0, 0), formats.by_name(words[0]).max, delayed=True)
    amax, scale = torch.zeros(1), torch.tensor([float(words[1].removeprefix("scale="))])
    made = quantize(x, spec, spec, scale=scale, amax_out=amax).rowwise
    return {"data": made.data, "scale_inv": made.scale_inv.reshape(1), "amax": amax}


def current(x: torch.Tensor, words: list[str]) -> dict[str, torch.Tensor]:
    spec = OperandSpec(
        words[0],
        (0, 0),
        formats.by_name(words[0]).max,
        power_of_two=words[1] == "pow2=1",
        amax_epsilon=float(words[2].removeprefix("eps=")),
    )
    made = quantize(x, spec, spec).rowwise
    return {"data": made.data, "scale_inv": made.scale_inv.reshape(1)}


def blocked(x: torch.Tensor, words: list[str], rows: int) -> dict[str, torch.Tensor]:
    spec = OperandSpec(
        words[0], (rows, 128), formats.by_name(words[0]).max, power_of_two=words[1] == "pow2=1"
    )
    row, column = quantize(x, spec, spec)
    scales = row.scale_inv, column.scale_inv
    if rows == 1:  # 1 x 128 scales are stored transposed
        scales = scales[0].t(), scales[1].t()
    return {
        "rowwise_data": row.data,
        "columnwise_data": column.data,
        "rowwise_scale_inv": scales[0],
        "columnwise_scale_inv": scales[1],
    }


def mxfp8(x: torch.Tensor, words: list[str]) -> dict[str, torch.Tensor]:
    spec = OperandSpec(words[0], (1, 32), formats.by_name(words[0]).max, scale_format="e8m0")
    row, column = quantize(x, spec, spec)
    return {
        "rowwise_data": row.data,
        "rowwise_scale": row.scale_inv,
        "columnwise_data_of_transpose": column.data,
        "columnwise_scale_of_transpose": column.scale_inv,
    }


def quantize_nvfp4(x: torch.Tensor, words: list[str]) -> Quantized:
    block = {"tile=1x16": (1, 16), "tile=16x16": (16, 16)}[words[0]]
    row = OperandSpec("e2m1", block, 6.0, scale_format="e4m3")
    is_transformed = {"rht=0": False, "rht=1": True}[words[1]]
    transformed = dataclasses.replace(row, transform="hadamard16")
    return quantize(x, row, transformed if is_transformed else row)


def nvfp4(x: torch.Tensor, words: list[str]) -> dict[str, torch.Tensor]:
    row, column = quantize_nvfp4(x, words)
    repeats = 16 if words[0] == "tile=16x16" else 1  # stored once for each row of a block
    return {
        "data": row.data,
        "scale": row.scale_inv.repeat_interleave(repeats, 0),
        "data_t": column.data,
        "scale_t": column.scale_inv.repeat_interleave(repeats, 0),
    }


FAMILIES: dict[str, Callable[[torch.Tensor, list[str]], dict[str, torch.Tensor]]] = {
    "delayed": delayed,
    "current": current,
    "block1d": lambda x, words: blocked(x, words, 1),
    "block2d": lambda x, words: blocked(x, words, 128),
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


def differences(made: torch.Tensor, expected: np.ndarray) -> str | None:
    if tuple(made.shape) != expected.shape:
        return f"shape {tuple(made.shape)}, expected {expected.shape}"
    ours = made.contiguous().numpy()
    if ours.dtype != expected.dtype:
        return f"dtype {ours.dtype}, expected {expected.dtype}"
    bits = np.dtype(f"u{ours.itemsize}")
    wrong = np.count_nonzero(ours.view(bits) != np.ascontiguousarray(expected).view(bits))
    return f"{wrong} of {expected.size} entries differ" if wrong else None


@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_equals_golden(family: str, files: dict[str, Arrays]) -> None:
    arrays, expected = arrays_of(files, family), {}
    made: dict[str, torch.Tensor] = {}
    for name in INPUTS[family]:
        of_input = vectors(arrays, family, name)
        x = as_input(arrays[f"x/{name}"])
        for prefix in dict.fromkeys(key.rpartition("/")[0] for key in of_input):
            for suffix, tensor in FAMILIES[family](x, prefix.split("/")[2:]).items():
                made[f"{prefix}/{suffix}"] = tensor
        expected |= of_input
    assert made.keys() == expected.keys()
    assert len(made) == NUM_ARRAYS[family]
    wrong = {key: differences(made[key], expected[key]) for key in expected}
    assert {key: reason for key, reason in wrong.items() if reason} == {}


@pytest.mark.parametrize("name", INPUTS["nvfp4"])
def test_global_scale_is_the_reciprocal_of_the_golden_encode_scale(
    name: str, files: dict[str, Arrays]
) -> None:
    arrays = files["nvfp4_seed0"]
    x = as_input(arrays[f"x/{name}"])
    keys = [
        key
        for key in arrays
        if key.startswith(f"nvfp4/{name}/") and key.rpartition("/")[2] in GLOBAL_AMAXES
    ]
    assert len(keys) == NUM_GLOBAL_AMAXES // len(INPUTS["nvfp4"])
    for key in keys:
        prefix, _, suffix = key.rpartition("/")
        row, column = quantize_nvfp4(x, prefix.split("/")[2:])
        made = row if suffix == "global_amax_row" else column
        # numerics.md 3.5: S_enc = 448 * 6 / amax, each operation in float32
        encode = np.float32(448 * 6) / arrays[key].reshape(1, 1)
        assert differences(made.global_scale_inv, np.float32(1) / encode) is None, key


def test_every_golden_array_is_compared(files: dict[str, Arrays]) -> None:
    compared = {
        (family, key)
        for family, name in CASES
        for key in vectors(arrays_of(files, family), family, name)
    }
    assert Counter(family for family, _ in compared) == NUM_ARRAYS
    left = Counter(
        key.split("/")[0] if key.startswith(("x/", "meta")) else key.rpartition("/")[2]
        for arrays in files.values()
        for key in arrays
        if (key.split("/")[0], key) not in compared
    )
    inputs = sum(map(len, (TE_INPUTS, MX_INPUTS, INPUTS["nvfp4"])))
    floor = dict.fromkeys(FLOOR_RULE, 6)
    amaxes = dict.fromkeys(GLOBAL_AMAXES, NUM_GLOBAL_AMAXES // 2)
    assert left == {"meta": 3, "x": inputs, **floor, **amaxes}
