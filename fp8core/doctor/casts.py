"""Tests of casts and of what their scales follow from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from fp8core import formats
from fp8core.backend_api import (
    GROUP_STEP,
    TRANSFORMS,
    AmaxDesc,
    DequantizeDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
    ScaleUpdateDesc,
    amax_extent,
    split_amax,
    split_groups,
)
from fp8core.doctor import cases
from fp8core.doctor.cases import Bench
from fp8core.doctor.compare import EQUAL, UNEQUAL, Error, operands_equal, share
from fp8core.doctor.matrix import DTYPE
from fp8core.inspect.descriptors import Need

__all__ = ["amax", "dequantize", "quantize", "scale_update"]


def quantize(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare codes and scales with the judge's; those of the judge by quantizing again."""
    desc = need.desc
    assert isinstance(desc, QuantizeDesc)
    name = need.step.partition(" ")[0]
    x = cases.tensor(name, desc.dtype)
    if bench.is_judge:
        yield from _requantized(bench, desc, x)
        return
    specs = (desc.rowwise, desc.columnwise)
    tested, expected = bench.quantized(desc, x), bench.expected(desc, x)
    for turned, (spec, ours, theirs) in enumerate(zip(specs, tested, expected, strict=True)):
        if spec is None:
            continue
        if ours is None or theirs is None:
            yield Error(UNEQUAL, "reference, which has both orientations")
        elif operands_equal(ours, theirs):
            yield Error(EQUAL, "reference, bit for bit")
        else:
            pairs = [(ours, theirs)]
            if desc.grouped:  # whose scales lie side by side
                step = GROUP_STEP if desc.offsets_on_device else 1
                split = functools.partial(split_groups, bounds=cases.OFFSETS, dim=turned, step=step)
                pairs = list(zip(split(spec, ours), split(spec, theirs), strict=True))
            for pair in pairs:
                yield _within_a_step(bench, spec, *pair)


def _within_a_step(bench: Bench, spec: OperandSpec, ours: Operand, theirs: Operand) -> Error:
    values = bench.values(spec, theirs)
    step = _step(spec) * _amax(spec, values)
    error = share(bench.values(spec, ours), values, step.expand_as(values))
    return Error(error, "reference; NOT bit for bit, bound one step of the format")


def _requantized(bench: Bench, desc: QuantizeDesc, x: torch.Tensor) -> Iterator[Error]:
    """Compare dequantized values with themselves, quantized again: no code changes."""
    if desc.grouped:
        return
    judged_by = "its values quantized again; bound 2 ulp of float32, for the scale"
    for turned, spec in enumerate((desc.rowwise, desc.columnwise)):
        if spec is None or spec.stochastic or spec.transform or spec.scale_format == "e4m3":
            continue
        rows = x.t() if turned else x
        wide = QuantizeDesc(torch.float32, spec, None)
        first = bench.quantized(wide, rows.float()).rowwise
        assert first is not None
        values = bench.values(spec, first)
        again = bench.quantized(wide, values.float()).rowwise
        assert again is not None
        bound = 2 * torch.finfo(torch.float32).eps * values.abs()
        yield Error(share(bench.values(spec, again), values, bound), judged_by)


def _step(spec: OperandSpec) -> float:
    """Return the widest gap between neighbours of the format up to the target, as a share of it.

    Twice that for scales that are powers of two, as rounding may halve them.
    """
    values = sorted(v for v in formats.by_name(spec.format).values if 0 <= v <= spec.target)
    gap = max(high - low for low, high in itertools.pairwise(values) if high > low)
    is_coarse = spec.power_of_two or spec.scale_format == "e8m0"
    return gap / spec.target * (2 if is_coarse else 1)


def _amax(spec: OperandSpec, values: torch.Tensor) -> torch.Tensor:
    """Return the amax that steps are measured by: the row's, or the tensor's for taller blocks."""
    magnitude = values.abs()
    return magnitude.amax(1, keepdim=True) if spec.block[0] == 1 else magnitude.amax().reshape(1, 1)


def dequantize(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare ``dequantize(quantize(x))`` with ``x``: within one step of the format."""
    desc = need.desc
    assert isinstance(desc, DequantizeDesc)
    spec = desc.operand
    if spec.transform is not None:
        return
    x = cases.tensor(need.step, DTYPE)
    operand = bench.operand(spec, x, columnwise=False, grouped=False)
    if operand is not None:
        dequantized = bench.bind(desc)(operand)
        expected = x.double()
        bound = (_step(spec) * _amax(spec, expected)).expand_as(expected)
        yield Error(share(dequantized, expected, bound), "x; bound one step of the format at amax")


def amax(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare amaxes with the largest magnitudes."""
    desc = need.desc
    assert isinstance(desc, AmaxDesc)
    cast = desc.quantize
    x = cases.tensor(need.step, cast.dtype)
    amaxes = split_amax(cast, bench.bind(desc)(x.to(bench.device)).cpu(), *x.shape)
    for turned, spec in enumerate((cast.rowwise, cast.columnwise)):
        amax = amaxes[turned]
        if spec is None or amax is None:
            continue
        values = x if spec.transform is None else TRANSFORMS[spec.transform](x, 1 - turned)
        magnitude = values.t().abs() if turned else values.abs()
        largest = magnitude.amax(1) if amax_extent(spec) == "row" else magnitude.amax().reshape(1)
        is_equal = torch.equal(amax, largest.float())
        yield Error(EQUAL if is_equal else UNEQUAL, "the largest magnitudes, bit for bit")


def scale_update(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare three slots with an example worked out by hand.

    Their histories hold a new amax that is the largest, an older one that is larger, and none.
    """
    desc = need.desc
    assert isinstance(desc, ScaleUpdateDesc)
    history = torch.tensor([[4.0, 4.0, 0.0], [1.0, 2.0, 3.0], [2.0, 8.0, 5.0]])
    scale, target = torch.ones(3), torch.full((3,), 448.0)
    moved = [state.to(bench.device) for state in (history, scale, target)]
    bench.bind(desc)(*([state] for state in moved))
    second = 56.0 if desc.algorithm == "max" else 112.0  # 448 / 8, or 448 / 4
    expected = [
        [[0.0, 0.0, 0.0], [2.0, 8.0, 3.0], [4.0, 4.0, 5.0]],
        [112.0, second, 1.0],  # 448 / 4; the third keeps its scale
    ]
    updated = [moved[0].cpu().tolist(), moved[1].cpu().tolist()]
    yield Error(EQUAL if updated == expected else UNEQUAL, "an example worked out by hand")
