"""The parts of a weight as one tensor: a view of the buffer that they lie in, or a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.torch_ops.private import forward_mode_level, is_traced, is_transform_active

__all__ = ["Buffer", "in_one_buffer"]


_MIN_BYTES = 1 << 20
"""Smaller tensors are copied, which takes the host less time than a view with a node of its own."""


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        ctx.set_materialize_grads(False)
        return _whole(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:  # left to a later call
            return (None,) * len(ctx.rows)
        pieces = torch.split(grad, ctx.rows)
        return tuple(
            piece if is_needed else None
            for piece, is_needed in zip(pieces, ctx.needs_input_grad, strict=True)
        )


# The C++ function that _Join.apply ends in, without the questions about transforms before it.
_join: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Join).apply


class Buffer:
    """Joins parameters that were allocated as parts of one buffer.

    It compares identities, and keeps no parameter alive; its copy, in a copy of the layer, knows no
    parameters. Parameters of one buffer share a version counter, so that torch sees a write to
    any of them in a saved view of the buffer.
    """

    __slots__ = ("_identities",)

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        self._identities = [*map(id, parameters)]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``parts`` concatenated along the first dimension: a view of their buffer if they
        still are its parameters and lie in it, else a copy, as of few bytes."""
        if (
            sum([part.nbytes for part in parts]) < _MIN_BYTES
            or [*map(id, parts)] != self._identities
            or torch.compiler.is_compiling()
            or is_traced()
            or is_transform_active()
            or forward_mode_level() >= 0
            or not _are_adjacent(parts)
        ):
            return torch.cat([*parts])
        if torch.is_grad_enabled() and any([part.requires_grad for part in parts]):
            return _join(*parts)
        return _whole(parts)

    def __reduce__(self) -> tuple[type[Buffer], tuple[()]]:
        return Buffer, ()


def in_one_buffer(whole: torch.Tensor, rows: Sequence[int]) -> list[torch.nn.Parameter]:
    """Return parameters that are ``whole``, cut along the first dimension."""
    return [torch.nn.Parameter(piece) for piece in torch.split(whole.detach(), [*rows])]


def _are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    """Say whether contiguous ``parts`` follow each other in the storage of the first."""
    first = parts[0]
    dtype, width, address = first.dtype, first.shape[1:], first.data_ptr()
    storage, end = first.untyped_storage(), address
    for part in parts:
        if (
            part.data_ptr() != end
            or part.dtype is not dtype
            or part.shape[1:] != width
            or not part.is_contiguous()
        ):
            return False
        end += part.nbytes
    # Two allocations may be neighbours too.
    return address != 0 and end <= storage.data_ptr() + storage.nbytes()


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return adjacent ``parts`` as a view of the first, a parameter, without a history."""
    first = parts[0]
    size = (sum([part.shape[0] for part in parts]), *first.shape[1:])
    with torch.no_grad():
        return first.as_strided(size, first.stride())
