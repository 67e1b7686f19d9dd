"""Tests of norms, activations, attention and of what training needs around layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    AttentionBackwardDesc,
    AttentionDesc,
    ColumnSumsDesc,
    NormBackwardDesc,
    NormDesc,
    RotaryDesc,
)
from fp8core.doctor import cases
from fp8core.doctor.cases import Bench
from fp8core.doctor.compare import EQUAL, UNEQUAL, Error, equals, share
from fp8core.inspect.descriptors import Need
from fp8core.testing.training_calls import training_call
from fp8core.torch_ops.private import pytree

__all__ = ["activation", "attention", "column_sums", "norm", "rotary", "training"]


def _float64(desc: Any) -> Any:
    """Return ``desc`` with every dtype float64, for the judge."""
    if isinstance(desc, NormBackwardDesc):
        return NormBackwardDesc(_float64(desc.norm))
    return replace(desc, dtype=torch.float64, out_dtype=torch.float64)


def _in_float64(
    bench: Bench, desc: Any, arguments: Sequence[torch.Tensor | None]
) -> Iterator[Error]:
    moved = [None if x is None else x.to(bench.device) for x in arguments]
    wide = [None if x is None else x.double() for x in arguments]
    results = bench.bind(desc)(*moved)
    expected = bench.judge.bind(_float64(desc), cases.CPU)(*wide)
    if isinstance(results, torch.Tensor):
        results, expected = [results], [expected]
    for result, wanted in zip(results, expected, strict=True):
        if result is None or wanted is None:
            yield Error(EQUAL if result is wanted else UNEQUAL, "float64")
            continue
        bound = torch.finfo(result.dtype).eps * wanted.abs() + 2**-18 * wanted.abs().amax()
        yield Error(share(result, wanted, bound), "float64; bound 1 ulp + 2^-18 amax")


def norm(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare a norm, or its gradient, with the judge's in float64."""
    desc = need.desc
    assert isinstance(desc, NormDesc | NormBackwardDesc)
    yield from _in_float64(bench, desc, cases.norm_arguments(desc, bench.judge))


def activation(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare an activation, or its gradient, with the judge's in float64."""
    desc = need.desc
    assert isinstance(desc, ActivationDesc | ActivationBackwardDesc)
    yield from _in_float64(bench, desc, cases.pointwise_arguments(desc))


def rotary(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare turned heads with the judge's."""
    desc = need.desc
    assert isinstance(desc, RotaryDesc)
    keywords = cases.rotary_positions(desc)
    moved = {name: one.to(bench.device) for name, one in keywords.items()}
    x, freqs = cases.rotary_arguments(desc)
    y = bench.bind(desc)(x.to(bench.device), freqs.to(bench.device), **moved)
    wide = replace(desc, dtype=torch.float64)
    wanted = bench.judge.bind(wide, cases.CPU)(x.double(), freqs, **keywords)
    bound = torch.finfo(desc.dtype).eps * wanted.abs() + 2**-19 * x.abs().amax()
    yield Error(share(y, wanted, bound), "float64; bound 1 ulp + 2^-19 amax")


def attention(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare the result, or the gradients, with the judge's in float64."""
    forward = need.desc.attention if isinstance(need.desc, AttentionBackwardDesc) else need.desc
    assert isinstance(forward, AttentionDesc)
    *given, grad = cases.attention_arguments(forward)
    moved, wide = [x.to(bench.device) for x in given], [x.double() for x in given]
    judge = replace(forward, dtype=torch.float64)
    expected = out, stats, _ = bench.judge.bind(judge, cases.CPU)(*wide)
    if isinstance(need.desc, AttentionBackwardDesc):
        saved = [one.to(bench.device) for one in (out.to(forward.dtype), stats.float())]
        results = bench.bind(need.desc)(grad.to(bench.device), *moved, *saved)
        backward = bench.judge.bind(AttentionBackwardDesc(judge), cases.CPU)
        expected = backward(grad.double(), *wide, out, stats)
    else:
        results = bench.bind(forward)(*moved)
    for result, wanted in zip(results, expected, strict=True):
        if wanted is not None:
            bound = 16 * torch.finfo(forward.dtype).eps * wanted.abs().amax().expand_as(wanted)
            yield Error(share(result, wanted, bound), "float64; bound 16 ulp of the amax")


def column_sums(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare sums of columns with those in float64."""
    desc = need.desc
    assert isinstance(desc, ColumnSumsDesc)
    x = cases.tensor("grad_output", desc.dtype)
    sums = bench.bind(desc)(x.to(bench.device))
    wide = x.double()
    bound = (len(x) + 4) * 2**-24 * wide.abs().sum(0)
    yield Error(share(sums, wide.sum(0), bound), "float64; bound (rows + 4) 2^-24 sum |x|")


def training(bench: Bench, need: Need) -> Iterator[Error]:
    """Compare the results, and the tensors that the operation writes, with the judge's."""
    call = training_call(need.desc, 0, (cases.TOKENS, cases.IN_FEATURES))
    given, named = bench.to_device(call.arguments), bench.to_device(call.keywords)
    expected = bench.judge.bind(need.desc, cases.CPU)(*call.arguments, **call.keywords)
    results = bench.bind(need.desc)(*given, **named)
    written = [at for at in call.written if isinstance(at, int)]
    ours = _tensors((results, [given[at] for at in written]))
    theirs = _tensors((expected, [call.arguments[at] for at in written]))
    for one, wanted in zip(ours, theirs, strict=True):
        if wanted.is_floating_point():
            wide = wanted.double()
            step = torch.finfo(wanted.dtype).eps
            bound = (step * wide.abs() + 2**-18 * wide.abs().amax()) if wide.numel() else wide
            yield Error(share(one, wide, bound), "the reference; bound 1 ulp + 2^-18 amax")
        else:
            is_equal = equals(one, wanted)
            yield Error(EQUAL if is_equal else UNEQUAL, "the reference, bit for bit")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
