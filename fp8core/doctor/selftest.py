"""A small test of each operation of a backend, which shows a faulty installation.

It is no proof: the conformance kit tests the laws of the backend API. The judge is the reference
backend on the CPU, in float64 for operations that take it. The reference backend on the CPU cannot
judge its own casts, so they are tested by quantizing a second time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fp8core import recipe
from fp8core.backend_api import BackendSpec
from fp8core.commands.arguments import NO_RECIPE
from fp8core.dispatch import plugins
from fp8core.dispatch.isolation import Failure, attempt
from fp8core.doctor import casts, fused, layers, products
from fp8core.doctor.cases import Bench
from fp8core.doctor.compare import Error
from fp8core.doctor.matrix import needs_of
from fp8core.inspect.descriptors import Need
from fp8core.testing.training_calls import TRAINING_DESCS

__all__ = ["Check", "check"]

JUDGE = "reference"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of the test of one operation.

    Attributes:
        op: the operation's name.
        cases: the number of descriptors that were run.
        worst: the largest error as a share of its bound; 0 is equal bit for bit, above 1 fails;
            None if no share is defined: a NaN, another shape, or no result.
        judged_by: the expected values that the results were compared with, and the bound.
        failure: why the test failed; None if it passed.
    """

    op: str
    cases: int
    worst: float | None
    judged_by: str
    failure: str | None = None


def check(spec: BackendSpec, op: str, device: torch.device) -> Check | None:
    """Test ``op`` of the backend of ``spec`` on ``device``, None if it supports no use of it."""
    registry = plugins.load()
    needs = [need for need in _needs(op) if registry.unsupported(spec, need.desc, device) is None]
    if not needs:
        return None
    if JUDGE not in registry.backends:
        return Check(op, 0, None, "", f"the judge, backend {JUDGE!r}, is not installed")
    bench = Bench(registry.instance(spec), registry.instance(registry.backends[JUDGE]), device)
    worst, num_run = Error(0.0, ""), 0
    for need in needs:
        errors = attempt(functools.partial(_errors, op, bench, need))
        if isinstance(errors, Failure):
            reason = f"{need.step} {need.desc}: {errors}".strip()
            return Check(op, num_run, None, worst.judged_by, reason)
        num_run += bool(errors)
        largest = max(errors, key=lambda error: error.share, default=worst)
        worst = max(largest, worst, key=lambda error: error.share)
        if largest.share > 1:
            reason = f"{need.step} {need.desc}: {_amount(largest.share)}".strip()
            amount = largest.share if math.isfinite(largest.share) else None
            return Check(op, num_run, amount, largest.judged_by, reason)
    return Check(op, num_run, worst.share, worst.judged_by)


def _errors(op: str, bench: Bench, need: Need) -> list[Error]:
    return list(_RUNS[op](bench, need))


def _amount(error: float) -> str:
    return f"{error:.3g} of the bound" if math.isfinite(error) else "not equal, or NaN"


def _needs(op: str) -> list[Need]:
    """Return the uses of ``op`` in all recipes, each once, without recipes that fail: the matrix
    names those."""
    answers = [
        attempt(functools.partial(needs_of, op, name)) for name in (NO_RECIPE, *recipe.names())
    ]
    lists = [needs for needs in answers if not isinstance(needs, Failure)]
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


_RUNS: dict[str, Callable[[Bench, Need], Iterator[Error]]] = {
    "activation": layers.activation,
    "activation_backward": layers.activation,
    "activation_backward_quantize": fused.quantizing,
    "activation_quantize": fused.quantizing,
    "add_norm": fused.add_norm,
    "amax": casts.amax,
    "attention": layers.attention,
    "attention_backward": layers.attention,
    "column_sums": layers.column_sums,
    "dequantize": casts.dequantize,
    "gemm": products.gemm,
    "grouped_gemm": products.grouped_gemm,
    "norm": layers.norm,
    "norm_backward": layers.norm,
    "norm_backward_quantize": fused.quantizing,
    "norm_quantize": fused.quantizing,
    "quantize": casts.quantize,
    "rotary": layers.rotary,
    "scale_update": casts.scale_update,
    **dict.fromkeys((desc.op for desc in TRAINING_DESCS), layers.training),
}
