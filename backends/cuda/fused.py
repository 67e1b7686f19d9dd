"""A producer and the cast of its result in one pass, where there is a kernel for both.

A kernel has its bounds: what it does not take in a call (sizes, addresses), the same callable
computes in two steps, which give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    FusedDesc,
    NormDesc,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.cuda.fused_activation import (
    bind_fused_activation,
    fused_activation_problem,
    has_two_parts,
)
from fp8core_backends.cuda.fused_norm import bind_fused_norm, fused_norm_problem
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.quantize import cast_problem
from fp8core_backends.cuda.quantize_compose import is_one_call


class _Producer(NamedTuple):
    """Why a fusion with a producer has no kernel, or None; and the callable of one that has."""

    problem: Callable[[Any, OperandSpec], str | None]
    bind: Callable[[Any, torch.device, Any], Callable[..., Any]]


_ACTIVATION = _Producer(fused_activation_problem, bind_fused_activation)
_PRODUCERS: dict[type, _Producer] = {
    ActivationDesc: _ACTIVATION,
    ActivationBackwardDesc: _ACTIVATION,
    NormDesc: _Producer(fused_norm_problem, bind_fused_norm),
}


def _problem(desc: FusedDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    problem = cast_problem(desc.quantize)
    if problem is not None:
        return problem
    producer = _PRODUCERS.get(type(desc.producer))
    cast = desc.quantize
    if producer is None:
        return f"{desc.op} is not written for CUDA yet"
    if type(cast) is not QuantizeDesc or cast.grouped:
        return f"no fusion with casts of groups or by given amaxes, only with {QuantizeDesc.op}"
    spec = cast.rowwise or cast.columnwise
    assert spec is not None
    if not is_one_call(cast):
        return "no fusion with casts whose orientations differ"
    if cast.split and not has_two_parts(desc.producer):
        return f"{desc.op} has no two halves that are cast apart"
    return producer.problem(desc, spec)


@runs(FusedDesc, refuses=_problem, is_recorded=True)
def bind_fused(desc: FusedDesc, device: torch.device, native: Any) -> Callable[..., Any]:
    """Return the callable of ``desc``."""
    return _PRODUCERS[type(desc.producer)].bind(desc, device, native)
