"""The library's one autograd.Function: a layer is a tuple of ops, run forward and back here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8core.ops.protocol import DENSE, Call, Op

__all__ = ["is_under_torch_autocast", "run"]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: tuple[Op, ...], call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        y, saved, steps = _forward(ops, call, x, params, ctx.needs_input_grad[2:])
        ctx.save_for_backward(*saved)
        ctx.steps = steps
        ctx.call = call
        ctx.input_shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: an error only if it is used
            return _backward_once(ctx, grad_output)
        return _backward(ctx, grad_output)


def run(
    ops: tuple[Op, ...], x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> torch.Tensor:
    """Run ``x [..., k]`` through ``ops``; ``params`` are theirs, in order. Returns ``[..., n]``.

    What the ops save for backward is what some gradient needs, nothing where none is.
    ``torch.autocast`` is kept out of the backends: its casts would change their arithmetic.
    """
    device_type = x.device.type
    if is_under_torch_autocast(device_type):
        with torch.autocast(device_type, enabled=False):
            return _run(ops, x, params, call)
    return _run(ops, x, params, call)


def is_under_torch_autocast(device_type: str) -> bool:
    """Say whether ``torch.autocast`` is on for the device type; asking it of meta would raise."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _run(
    ops: tuple[Op, ...], x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
) -> torch.Tensor:
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
    shape = x.shape
    y = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    saved: list[torch.Tensor | None] = []
    steps = []
    need_input, first = needs[0], 0
    for op in ops:
        last = first + op.num_params
        own = (need_input, *needs[1 + first : 1 + last])
        y, kept, context = op.forward(y, params[first:last], call, own, None)
        saved.extend(kept)
        steps.append((op, len(kept), context, own))
        need_input, first = True in own, last
    if len(shape) != 2:
        y = y.reshape(*shape[:-1], y.shape[-1])
    return y, saved, steps


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    device_type = grad_output.device.type
    if is_under_torch_autocast(device_type):
        with torch.autocast(device_type, enabled=False):
            return _backward(ctx, grad_output)
    shape = grad_output.shape
    grad: torch.Tensor | None
    grad = grad_output if len(shape) == 2 else grad_output.reshape(-1, shape[-1])
    saved: Sequence[torch.Tensor | None] = ctx.saved_tensors
    grad_params: Sequence[torch.Tensor | None] = ()
    end = len(saved)
    for op, count, context, needs in reversed(ctx.steps):
        if grad is None:
            grad_params = (*(None,) * (len(needs) - 1), *grad_params)
            continue
        kept = saved[end - count : end]
        grad, own = op.backward(grad, kept, context, ctx.call, needs)
        end -= count
        grad_params = (*own, *grad_params)
    if grad is not None and len(ctx.input_shape) != 2:
        grad = grad.reshape(ctx.input_shape)
    return None, None, grad, *grad_params


_backward_once = once_differentiable(_backward)


def _any_requires_grad(params: Sequence[torch.Tensor]) -> bool:
    for param in params:  # noqa: SIM110  a loop costs less than any() over a generator
        if param.requires_grad:
            return True
    return False
