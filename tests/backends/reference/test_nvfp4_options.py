"""Options of two-level scales, bit for bit as in Transformer Engine's reference of NVFP4."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from fp8core.backend_api import AmaxDesc, OperandSpec, QuantizeByAmaxDesc, QuantizeDesc
from fp8core_backends.reference.quantize import amax, dequantize_float32, quantize
from tests.backends.reference.test_golden import Arrays, as_input

INPUTS = (
    *("normal.bf16", "wide.bf16", "zero_blocks.bf16", "outlier.bf16", "steps.bf16"),
    "normal.fp32",
)
TRANSFORMS = {"0": None, "1": "hadamard16", "unsigned": "hadamard16_unsigned"}


@pytest.fixture(scope="module")
def stored(golden: Callable[[str], Arrays]) -> Arrays:
    return golden("nvfp4_options_seed0")


def specs_of(case: str) -> tuple[OperandSpec, OperandSpec]:
    words = dict(word.split("=") for word in case.split("/"))
    rows = int(words["tile"].split("x")[0])
    row = OperandSpec(
        "e2m1",
        (rows, 16),
        6.0,
        scale_format="e4m3",
        row_scaled=words["row"] == "1",
        four_over_six=None if words["4over6"] == "no" else words["4over6"],
        scale_max=float(words["max"]),
    )
    return row, dataclasses.replace(row, transform=TRANSFORMS[words["rht"]])


def cases(stored: Arrays, name: str) -> list[str]:
    start = f"nvfp4/{name}/"
    keys = [key.removeprefix(start) for key in stored if key.startswith(start)]
    return list(dict.fromkeys(key.rpartition("/")[0] for key in keys))


@pytest.mark.parametrize("name", INPUTS)
def test_codes_and_scales_equal_those_of_the_reference(name: str, stored: Arrays) -> None:
    x = as_input(stored[f"x/{name}"])
    wrong = []
    for case in cases(stored, name):
        row_spec, column_spec = specs_of(case)
        made = quantize(QuantizeDesc(x.dtype, row_spec, column_spec), x)
        for operand, spec, suffix in zip(made, (row_spec, column_spec), ("", "_t"), strict=True):
            scale = operand.scale_inv.repeat_interleave(spec.block[0], 0)
            for key, ours in (("data", operand.data), ("scale", scale)):
                expected = torch.from_numpy(stored[f"nvfp4/{name}/{case}/{key}{suffix}"])
                if not torch.equal(ours, expected):
                    wrong.append(f"{case}/{key}{suffix}: {int((ours != expected).sum())}")
    assert not wrong


@pytest.mark.parametrize("name", INPUTS)
def test_outer_scales_follow_from_the_amaxes_of_the_reference(name: str, stored: Arrays) -> None:
    x = as_input(stored[f"x/{name}"])
    for case in cases(stored, name):
        row_spec, column_spec = specs_of(case)
        made = quantize(QuantizeDesc(x.dtype, row_spec, column_spec), x)
        for operand, key in zip(made, ("row", "col"), strict=True):
            largest = torch.from_numpy(stored[f"nvfp4/{name}/{case}/global_amax_{key}"])
            encode = torch.full_like(largest, row_spec.scale_max * 6) / largest
            encode = torch.where(largest == 0, 1.0, encode)
            assert torch.equal(operand.global_scale_inv.reshape(-1), 1 / encode), (case, key)


ROW = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", row_scaled=True)
SIX = dataclasses.replace(ROW, row_scaled=False, four_over_six="MAE", scale_max=256.0)
SQUARE = dataclasses.replace(SIX, block=(16, 16))


@pytest.mark.parametrize("spec", [ROW, SIX, SQUARE], ids=["row", "four_over_six", "square"])
def test_given_amaxes_make_the_same_operands(spec: OperandSpec) -> None:
    x = torch.randn(48, 64) * torch.logspace(-2, 2, 48)[:, None]
    desc = QuantizeDesc(x.dtype, spec, spec)
    given = amax(AmaxDesc(desc), x)
    by_amax = quantize(QuantizeByAmaxDesc.of(desc), x, amax=given)
    for ours, theirs in zip(by_amax, quantize(desc, x), strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_row_of_large_values_leaves_the_accuracy_of_others() -> None:
    x = torch.randn(32, 64)
    x[0] *= 1e6
    plain = dataclasses.replace(ROW, row_scaled=False)
    errors = []
    for spec in (ROW, plain):
        operand = quantize(QuantizeDesc(x.dtype, spec, None), x).rowwise
        difference = dequantize_float32(spec, operand)[1:] - x[1:]
        errors.append((difference.norm() / x[1:].norm()).item())
    assert errors[0] < 0.15
    assert errors[1] == 1.0  # every scale is rounded to 0


@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_the_choice_never_loses_more_than_either_maximum(mode: str) -> None:
    x = torch.randn(64, 64)
    spec = dataclasses.replace(SIX, four_over_six=mode, scale_max=448.0)
    plain = dataclasses.replace(spec, four_over_six=None)
    power = 1 if mode == "MAE" else 2

    def error(spec: OperandSpec) -> torch.Tensor:
        operand = quantize(QuantizeDesc(x.dtype, spec, None), x).rowwise
        difference = (dequantize_float32(spec, operand) - x).abs() ** power
        return difference.unflatten(1, (-1, 16)).sum(2)

    chosen, six = error(spec), error(plain)
    assert (chosen <= six * 1.00001).all()
    assert chosen.sum() < 0.97 * six.sum()


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (1, 16), (5, 48)])
def test_small_sizes(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    for spec in (ROW, SIX, SQUARE):
        operand = quantize(QuantizeDesc(x.dtype, spec, None), x).rowwise
        assert dequantize_float32(spec, operand).shape == shape
