"""How an operation of the backend API becomes an operator of torch: defined, bound, settled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api.record import ResultShape
from fp8core.errors import OperandError
from fp8core.torch_ops.capture import is_captured

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
    schema: str, fake: Callable[..., Any], *, name: str = "", tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as the operator ``name``, by default of its own name.

    torch.library.custom_op counts what an operator writes, and costs a call three times as much as
    torch.library.Library, which serves the others.
    """

    def register(run: Callable[..., Any]) -> Any:
        operator = name or run.__name__.strip("_")
        _implementations[operator] = run
        written = _MUTATED.findall(schema)
        if written:
            qualified = f"fp8core::{operator}"
            result = torch.library.custom_op(qualified, run, mutates_args=written, schema=schema)
            result.register_fake(fake)
            return result
        _LIBRARY.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(operator, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp8core::{operator}", fake, lib=_LIBRARY)
        return getattr(torch.ops.fp8core, operator).default

    return register


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
    return result.t().contiguous().t() if shape.is_transposed else result.contiguous()


def settle_all(
    results: Sequence[torch.Tensor | None], shapes: Sequence[ResultShape]
) -> list[torch.Tensor]:
    """Return the results that are not None in their shapes, none of them in the memory of another:
    the scale that two orientations share is copied. Tensors that torch traces with have none."""
    settled: list[torch.Tensor] = []
    memories: set[int] = set()
    present = [tensor for tensor in results if tensor is not None]
    has_memory = len(present) > 1 and not is_captured(present[0])
    for tensor, shape in zip(present, shapes, strict=True):
        result = settle(tensor, shape)
        if has_memory:
            memory = result.untyped_storage().data_ptr()
            if memory in memories and result.numel():
                result = result.clone()
                memory = result.untyped_storage().data_ptr()
            memories.add(memory)
        settled.append(result)
    return settled
