"""Weight gradients added to ``weight.main_grad`` by the GEMM that computes them.

A framework gives each weight a float32 ``main_grad``, zeroes it before a step, and reads it after:
no gradient in the weight's dtype is made, and microbatches add up in float32. The names are
Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Forward,
    Out,
    Params,
    Program,
    Wrapper,
)
from fp8core.errors import OperandError


class Accumulating(Wrapper):
    """Around a linear program: ``wgrad(..., out=main_grad)`` adds up the weights' gradients.

    ``needs_grad`` is the weights' alone. A missing ``main_grad`` is refused in backward, which may
    be called again once it is there: so nothing is freed early.
    """

    __slots__ = ("_needs_grad", "_wgrad")

    def __init__(
        self, inner: Program, wgrad: Callable[..., Any], needs_grad: Sequence[bool]
    ) -> None:
        super().__init__(inner, inner.input_request)
        self.frees_early = False
        self._wgrad = wgrad
        self._needs_grad = needs_grad

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; backward is told the weights, or the sequence of them if there are groups."""
        y, saved, _ = super().forward(x, params, call, out)
        return y, saved, partial(_add_to_main_grads, self._wgrad, params[0], self._needs_grad)


def _add_to_main_grads(
    wgrad: Callable[..., Any],
    weights: Any,
    needs_grad: Sequence[bool],
    dy: Any,
    x: Any,
    *groups: torch.Tensor,
) -> Any:
    """Run ``wgrad`` into ``main_grad``; return the gradients for autograd, one for each group."""
    if groups:
        return accumulate(wgrad, (dy, x, *groups), weights, needs_grad, is_grouped=True)
    return accumulate(wgrad, (dy, x), (weights,), needs_grad, is_grouped=False)[0]


def accumulate(
    wgrad: Callable[..., Any],
    operands: tuple[Any, ...],
    weights: Sequence[torch.Tensor],
    needed: Sequence[bool],
    *,
    is_grouped: bool,
) -> list[torch.Tensor | None]:
    """Add the gradients that ``wgrad(*operands, out=...)`` computes to each ``main_grad``.

    Returns the gradients for autograd: None, or zeros for a weight that has the attribute
    ``grad_added_to_main_grad``, which is set: its framework has hooks that wait for a gradient.
    Where padding makes the product larger than the weight, or a weight is frozen, the sum takes a
    second pass.

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
        for sum_, grad in zip(sums, scratch, strict=True):
            if sum_ is not None:
                sum_ += grad[: sum_.shape[0], : sum_.shape[1]]
    return [_grad_for_autograd(weight) if need else None for weight, need in pairs]


def _fits(main_grad: torch.Tensor, dy: Any, x: Any) -> bool:
    return main_grad.shape == (dy.data.shape[0], x.data.shape[0])


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    main_grad: Any = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        raise OperandError(
            f"fuse_wgrad_accumulation=True adds to weight.main_grad, but a weight "
            f"{list(weight.shape)} has main_grad={main_grad!r}. Set it before backward: "
            f"weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)."
        )
    wanted = (weight.shape, torch.float32, weight.device)
    if (main_grad.shape, main_grad.dtype, main_grad.device) != wanted:
        raise OperandError(
            f"fuse_wgrad_accumulation=True adds to weight.main_grad {list(main_grad.shape)} "
            f"{main_grad.dtype} on {main_grad.device}; expected {list(weight.shape)} "
            f"torch.float32 on {weight.device}."
        )
    return main_grad


def _grad_for_autograd(weight: Any) -> torch.Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
