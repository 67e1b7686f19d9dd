"""The library's one autograd.Function: a layer is a tuple of ops, run forward and back here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8core.ops.protocol import DENSE, Call, Op

__all__ = ["run"]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: tuple[Op, ...], call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad[2:]
        y, saved, steps = _forward(ops, call, x, params, needs)
        ctx.save_for_backward(*saved)
        ctx.steps = steps
        ctx.call = call
        ctx.input_shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: Sequence[torch.Tensor | None] = ctx.saved_tensors
        grad: torch.Tensor | None = grad_output.reshape(-1, grad_output.shape[-1])
        grad_params: tuple[torch.Tensor | None, ...] = ()
        end = len(saved)
        device_type = grad_output.device.type
        with _without_autocast(device_type):
            for op, count, context, needs in reversed(ctx.steps):
                if grad is None:
                    grad_params = ((None,) * (len(needs) - 1)) + grad_params
                    continue
                made = op.backward(grad, saved[end - count : end], context, ctx.call, needs)
                end -= count
                grad = made.grad_input
                grad_params = (*made.grad_params, *grad_params)
        grad_input = None if grad is None else grad.reshape(ctx.input_shape)
        return None, None, grad_input, *grad_params


def run(
    ops: tuple[Op, ...], x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> torch.Tensor:
    """Run ``x [..., k]`` through ``ops``; ``params`` are theirs, in order. Returns ``[..., n]``.

    What the ops save for backward is what some gradient needs, nothing where none is.
    """
    with _without_autocast(x.device.type):
        if torch.is_grad_enabled() and (x.requires_grad or _any_requires_grad(params)):
            y: torch.Tensor = _Chain.apply(ops, call, x, *params)  # type: ignore[no-untyped-call]
            return y
        return _forward(ops, call, x, params, (False,) * (1 + len(params)))[0]


def _forward(
    ops: tuple[Op, ...],
    call: Call,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None], list[Any]]:
    lead = x.shape[:-1]
    y = x.reshape(-1, x.shape[-1])
    saved: list[torch.Tensor | None] = []
    steps = []
    need_input, first = needs[0], 0
    for op in ops:
        last = first + op.num_params
        own = (need_input, *needs[1 + first : 1 + last])
        output, kept, context = op.forward(y, params[first:last], call, own, None)
        saved.extend(kept)
        steps.append((op, len(kept), context, own))
        y, need_input, first = output, True in own, last
    return y.reshape(*lead, y.shape[-1]), saved, steps


def _any_requires_grad(params: Sequence[torch.Tensor]) -> bool:
    return any(param.requires_grad for param in params)


class _NoContext:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_NO_CONTEXT = _NoContext()


def _without_autocast(device_type: str) -> Any:
    """Keep torch.autocast out of the backends: its casts would change their float32 arithmetic."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NO_CONTEXT
