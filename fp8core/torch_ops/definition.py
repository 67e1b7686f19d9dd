"""How an operation of the backend API becomes an operator of torch: defined, bound, settled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fp8core.backend_api.record import ResultShape
from fp8core.errors import OperandError
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.private import keep_order, schema_of

Binder = Callable[[str, torch.device], Callable[..., Any]]
Tensors = Sequence[torch.Tensor]

_LIBRARY: Any = torch.library.Library("fp8core", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_MUTATED = re.compile(r"!\)\S* (\w+)")

_binder: list[Binder] = []
_implementations: dict[str, Callable[..., Any]] = {}


def set_binder(binder: Binder) -> None:
    """Bind the operations of graphs with ``binder(text, device)``."""
    _binder[:] = [binder]


def bound(text: str, device: torch.device) -> Callable[..., Any]:
    """Return the callable that runs the operation encoded in ``text`` on ``device``."""
    return _binder[0](text, device)


def define(
    schema: str,
    fake: Callable[..., Any],
    *,
    name: str = "",
    tags: Sequence[torch.Tag] = (),
    is_ordered: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as the operator ``name``, by default of its own name.

    ``is_ordered``: torch neither drops, doubles nor moves a call. torch.library.custom_op, which
    counts what an operator writes, and orders calls, costs three times as much a call as
    torch.library.Library, so both are done here.
    """

    def register(run: Callable[..., Any]) -> Any:
        operator = name or run.__name__.strip("_")
        _implementations[operator] = run
        _LIBRARY.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        result = getattr(torch.ops.fp8core, operator).default
        written, arguments = _MUTATED.findall(schema), schema_of(result).arguments
        places = [at for at, each in enumerate(arguments) if each.name in written]
        kernel = counting_writes(run, places) if places else run
        _LIBRARY.impl(operator, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp8core::{operator}", fake, lib=_LIBRARY)
        if is_ordered:
            keep_order(_LIBRARY, f"fp8core::{operator}")
        return result

    return register


def counting_writes(run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return ``run``, which writes to its arguments at ``places``, with torch's count of writes."""

    def counted(*values: Any) -> Any:
        result = run(*values)
        for at in places:
            value = values[at]
            tensors = (value,) if isinstance(value, torch.Tensor) else value or ()
            increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        return result

    return counted


def implementation(name: str) -> Callable[..., Any]:
    """Return what the operator ``name`` runs, for a graph to hold what it does instead of it."""
    return _implementations[name]


def settle(result: torch.Tensor, shape: ResultShape) -> torch.Tensor:
    """Return ``result`` with the strides of ``shape``, padded with zeros to its size.

    Raises:
        OperandError: a backend returned another dtype or a larger size.
    """
    if result.shape != shape.size or result.dtype != shape.dtype:
        missing = [expected - size for expected, size in zip(shape.size, result.shape, strict=True)]
        if result.dtype != shape.dtype or any(size < 0 for size in missing):
            raise OperandError(
                f"a backend returned {result.dtype} {list(result.shape)}, expected {shape.dtype} "
                f"{list(shape.size)}."
            )
        result = torch.nn.functional.pad(result, (0, missing[1], 0, missing[0]))
    if shape.is_transposed:
        return result.t().contiguous().t()
    return result if result.is_contiguous() else result.contiguous()


def settle_all(
    results: Sequence[torch.Tensor | None], shapes: Sequence[ResultShape]
) -> list[torch.Tensor]:
    """Return the results that are not None in their shapes, none of them in the memory of another:
    the scale that two orientations share is copied. Tensors that torch traces with have none."""
    present = [tensor for tensor in results if tensor is not None]
    settled = [settle(tensor, shape) for tensor, shape in zip(present, shapes, strict=True)]
    if len(settled) == 1 or type(present[0]) is not torch.Tensor:
        return settled
    memories = [result.untyped_storage().data_ptr() for result in settled]
    if len(set(memories)) == len(memories) or is_captured(present[0]):
        return settled
    for at, result in enumerate(settled):
        if memories[at] in memories[:at] and result.numel():
            settled[at] = result.clone()
    return settled
