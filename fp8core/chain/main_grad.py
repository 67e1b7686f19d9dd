"""Weight gradients added to ``weight.main_grad`` by the GEMM that computes them.

A framework gives each weight a float32 ``main_grad``, zeroes it before a step, and reads it after:
no gradient in the weight's dtype is made, and microbatches add up in float32. The names are
Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.chain.padding import PaddedCall
from fp8core.errors import OperandError

__all__ = ["Accumulating", "accumulate"]


class Accumulating(NamedTuple):
    """What backward has to know of a forward whose weight gradients are added elsewhere."""

    padded: PaddedCall | None
    weights: tuple[torch.Tensor, ...]


def accumulate(
    wgrad: Callable[..., Any],
    operands: tuple[Any, ...],
    weights: Sequence[torch.Tensor],
    needed: Sequence[bool],
    is_grouped: bool,
) -> list[torch.Tensor | None]:
    """Add the gradients that ``wgrad(*operands, out=...)`` computes to each ``main_grad``.

    Returns what autograd gets: None, or zeros where a weight has ``grad_added_to_main_grad``, which
    is set: a framework that asks for it has hooks that wait for a gradient. Where padding makes
    the product larger than the weight, or a weight is frozen, the sum takes a second pass.

    Raises:
        OperandError: a weight has no ``main_grad`` of float32 and of its shape on its device.
    """
    pairs = list(zip(weights, needed, strict=True))
    sums = [_main_grad(weight) if need else None for weight, need in pairs]
    dy, x = operands[:2]
    if all(sum_ is not None and _fits(sum_, dy, x) for sum_ in sums):
        wgrad(*operands, out=sums if is_grouped else sums[0])
    else:
        shape = dy.data.shape[0], x.data.shape[0]
        scratch = [torch.zeros(shape, dtype=torch.float32, device=w.device) for w in weights]
        wgrad(*operands, out=scratch if is_grouped else scratch[0])
        for sum_, made in zip(sums, scratch, strict=True):
            if sum_ is not None:
                sum_ += made[: sum_.shape[0], : sum_.shape[1]]
    return [_handed(weight) if need else None for weight, need in pairs]


def _fits(main_grad: torch.Tensor, dy: Any, x: Any) -> bool:
    return main_grad.shape == (dy.data.shape[0], x.data.shape[0])


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    found: Any = getattr(weight, "main_grad", None)
    if not isinstance(found, torch.Tensor):
        raise OperandError(
            f"fuse_wgrad_accumulation=True adds to weight.main_grad, but a weight "
            f"{list(weight.shape)} has main_grad={found!r}. Set it before backward: "
            f"weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)."
        )
    wanted = (weight.shape, torch.float32, weight.device)
    if (found.shape, found.dtype, found.device) != wanted:
        raise OperandError(
            f"fuse_wgrad_accumulation=True adds to weight.main_grad {list(found.shape)} "
            f"{found.dtype} on {found.device}; expected {list(weight.shape)} torch.float32 on "
            f"{weight.device}."
        )
    return found


def _handed(weight: Any) -> torch.Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
