"""``torch.ops.fp8core``: every operation of the backend API as an operator of torch.

The first argument of each is an :class:`~fp8core.torch_ops.encoding.Operation` as text, the rest
are plain tensors in flat lists: an operand is ``[data, scale_inv, global_scale_inv]``, without
those that are None. No result shares memory with another tensor, and every write is declared,
except the count of :mod:`fp8core.torch_ops.counted`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, ParamSpec, TypeVar

import torch

from fp8core import errors
from fp8core.backend_api import Operand
from fp8core.backend_api.record import ResultShape
from fp8core.torch_ops import shapes
from fp8core.torch_ops.definition import Tensors, bound, define, empty, given, settle_all
from fp8core.torch_ops.encoding import decode
from fp8core.torch_ops.private import MARKED_CONSTANT, ORDERED, PASSES_DATACLASSES
from fp8core.torch_ops.shapes import settle
from fp8core.torch_ops.untraced import untraced

__all__ = ["constant_in_graph", "draw_seed", "refuse", "taking_dataclasses"]

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graph(function: Callable[..., Any]) -> None:
    """Have torch.compile call ``function`` while it traces, and keep its result.

    As torch.compiler.assume_constant_result, which imports all of torch.compile: that takes longer
    than the rest of ``import fp8core``.
    """
    setattr(function, MARKED_CONSTANT, True)


def taking_dataclasses(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which is then made a constant in graphs, for calls with a frozen
    dataclass.

    torch before 2.13 has none of those passed to a constant: there the graph breaks at the call,
    and with ``fullgraph=True`` torch raises that it would.
    """
    return function if PASSES_DATACLASSES else untraced(function)


# Quantization


def _count(group_offsets: torch.Tensor | None) -> int:
    return 0 if group_offsets is None else group_offsets.shape[0] - 1


@define(
    "(str operation, Tensor(a!)[] histories, Tensor(b!)[] scales, Tensor[] targets, "
    "Tensor(c!)[] nonfinite) -> ()",
    lambda text, histories, scales, targets, nonfinite: None,
)
def _scale_update(
    text: str, histories: Tensors, scales: Tensors, targets: Tensors, nonfinite: Tensors
) -> None:
    bound(text, scales[0].device)(histories, scales, targets, nonfinite)


# GEMMs


def _product_shape(text: str, a: torch.Tensor, b: torch.Tensor) -> ResultShape:
    desc: Any = decode(text).desc
    return ResultShape((a.shape[0], b.shape[0]), desc.out_dtype)


@define(
    "(str operation, Tensor[] a, Tensor[] b, Tensor? bias) -> Tensor",
    lambda text, a, b, bias: _product_shape(text, a[0], b[0]).empty(a[0].device),
)
def _gemm(text: str, a: Tensors, b: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
    result = bound(text, a[0].device)(Operand(*a), Operand(*b), bias=bias)
    return settle(result, _product_shape(text, a[0], b[0]))


@define(
    "(str operation, Tensor[] a, Tensor[] b, Tensor? bias, Tensor(a!) out) -> ()",
    lambda text, a, b, bias, out: None,
)
def _gemm_out(
    text: str, a: Tensors, b: Tensors, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    bound(text, a[0].device)(Operand(*a), Operand(*b), bias=bias, out=out)


def _grouped(
    text: str, a: Tensors, b: Tensors, group_offsets: torch.Tensor
) -> tuple[Operand, Operand | list[Operand]]:
    """Return the operands: ``b`` is one operand if k is grouped, else one a group."""
    desc: Any = decode(text).desc
    offsets = group_offsets.tolist()
    dim = 1 if desc.contract_groups else 0
    first = Operand(*shapes.trim(desc.a, a, offsets, dim))
    if desc.contract_groups:
        return first, Operand(*shapes.trim(desc.b, b, offsets, dim))
    step = len(b) // _count(group_offsets)
    return first, [Operand(*b[at : at + step]) for at in range(0, len(b), step)]


def _grouped_shapes(
    text: str, a: Tensors, b: Tensors, group_offsets: torch.Tensor
) -> list[ResultShape]:
    desc: Any = decode(text).desc
    shape = _product_shape(text, a[0], b[0])
    return [shape] * (_count(group_offsets) if desc.contract_groups else 1)


@define(
    "(str operation, Tensor[] a, Tensor[] b, Tensor group_offsets, Tensor[] bias) -> Tensor[]",
    lambda text, a, b, group_offsets, bias: empty(
        _grouped_shapes(text, a, b, group_offsets), a[0].device
    ),
)
def _grouped_gemm(
    text: str, a: Tensors, b: Tensors, group_offsets: torch.Tensor, bias: Tensors
) -> list[torch.Tensor]:
    operands = _grouped(text, a, b, group_offsets)
    results = bound(text, a[0].device)(*operands, group_offsets, **given(bias=list(bias) or None))
    results = [results] if isinstance(results, torch.Tensor) else results
    return settle_all(results, _grouped_shapes(text, a, b, group_offsets))


@define(
    "(str operation, Tensor[] a, Tensor[] b, Tensor group_offsets, Tensor[] bias, "
    "Tensor(a!)[] out) -> ()",
    lambda text, a, b, group_offsets, bias, out: None,
)
def _grouped_gemm_out(
    text: str,
    a: Tensors,
    b: Tensors,
    group_offsets: torch.Tensor,
    bias: Tensors,
    out: Tensors,
) -> None:
    desc: Any = decode(text).desc
    operands = _grouped(text, a, b, group_offsets)
    target = out if desc.contract_groups else out[0]
    run = bound(text, a[0].device)
    run(*operands, group_offsets, out=target, **given(bias=list(bias) or None))


# Seeds and errors in graphs


@torch.library.custom_op(
    "fp8core::draw_seed",
    mutates_args=(),
    schema="(int place) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _draw_seed(place: int) -> torch.Tensor:
    return torch.randint(0, 2**62, (2,))


@_draw_seed.register_fake
def _empty_seed(place: int) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


# Ordered, so that torch neither moves nor drops a draw whose seed only the backward graph uses, or
# nothing does: every later draw of the program would differ.
_draw_seed.register_effect(ORDERED)


@define(
    "(Tensor x, int columns, str kind, str message) -> Tensor",
    lambda x, columns, kind, message: x.new_empty(*x.shape[:-1], columns),
)
def _refuse(x: torch.Tensor, columns: int, kind: str, message: str) -> torch.Tensor:
    raise getattr(errors, kind)(message)


_places = count()


def draw_seed() -> torch.Tensor:
    """Draw a seed and an offset, int64 ``[2]``, when the graph runs.

    ``place`` differs in each draw of a graph: torch would merge equal calls into one.
    """
    result: torch.Tensor = _draw_seed(next(_places))
    return result


def refuse(x: torch.Tensor, columns: int, error: errors.Fp8CoreError) -> torch.Tensor:
    """Return a tensor ``[..., columns]`` of a graph that raises ``error`` when it runs."""
    result: torch.Tensor = _refuse(x.detach(), columns, type(error).__name__, str(error))
    return result
