"""Tests of fused operations: each equals its pair of operations bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8core.backend_api import (
    AddNormDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    Quantized,
)
from fp8core.doctor import cases
from fp8core.doctor.cases import Bench
from fp8core.doctor.compare import EQUAL, UNEQUAL, Error, equals, operands_equal
from fp8core.inspect.descriptors import Need

__all__ = ["add_norm", "quantizing"]

_JUDGED_BY = "the pair of this backend, bit for bit"


def quantizing(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare a producer fused with a cast with the two operations one after the other."""
    desc = need.desc
    assert isinstance(desc, FusedDesc)
    producer = desc.producer
    if isinstance(producer, NormDesc | NormBackwardDesc):
        arguments = cases.norm_arguments(producer, bench.judge)
    else:
        arguments = cases.pointwise_arguments(producer)
    moved = _moved(arguments, bench.device)
    fused, *rest = bench.bind(desc)(*moved, **cases.quantize_keywords(desc.quantize, bench.device))
    first, *others = _parts(bench.bind(producer)(*moved))
    yield _verdict(_same_operands(fused, bench.quantized(desc.quantize, first)))
    yield _verdict(_same(rest, others))


def add_norm(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare ``add_norm`` with the rounded sum and the norm of it."""
    desc = need.desc
    assert isinstance(desc, AddNormDesc)
    x, *parameters = _moved(cases.norm_arguments(desc.norm, bench.judge), bench.device)
    residual = x.flip(0)
    total = x + residual
    pair = [total, *bench.bind(desc.norm)(total, *parameters)]
    yield _verdict(_same(bench.bind(desc)(x, residual, *parameters), pair))


def _moved(arguments: Sequence[Any], device: torch.device) -> list[Any]:
    return [None if x is None else x.to(device) for x in arguments]


def _parts(results: Any) -> Sequence[Any]:
    return (results,) if isinstance(results, torch.Tensor) else results


def _same_operands(fused: Quantized, pair: Quantized) -> bool:
    return len(fused) == len(pair) and all(map(operands_equal, fused, pair))


def _same(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(results) == len(expected) and all(map(equals, results, expected))


def _verdict(is_equal: bool) -> Error:
    return Error(EQUAL if is_equal else UNEQUAL, _JUDGED_BY)
