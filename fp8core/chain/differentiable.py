"""Derivatives of any order, and transforms, of links in high precision.

In high precision the reference backend computes with torch's operators only. A link that is bound
for it, and run without the autograd node of :mod:`fp8core.chain.node`, is therefore an expression
that torch can differentiate, forward and backward; no second description of the link is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fp8core.chain.alone import is_transformed
from fp8core.chain.protocol import Link
from fp8core.chain.series import Chain
from fp8core.chain.shape import BindContext, LinkShape, bind_chain
from fp8core.dispatch import policy, table
from fp8core.errors import Fp8CoreError, UnsupportedError
from fp8core.recipe.plan import HIGH_PRECISION
from fp8core.tensors.quantizer_binding import Binding
from fp8core.torch_ops.private import interpreter_stack


def twins(links: Sequence[Link], like: torch.Tensor) -> Chain:
    """Return ``links`` bound to torch's operators, for activations like ``like``."""
    bind = functools.partial(_bound, device=like.device, dtype=like.dtype)
    return Chain([link.in_torch(bind) for link in links])


@functools.lru_cache(maxsize=4096)
def _bound(shape: LinkShape, *, device: torch.device, dtype: torch.dtype) -> Link:
    with policy.activated(policy.Policy(backend="reference")), table.in_eager():
        context = BindContext(HIGH_PRECISION, Binding(device, dtype), "torch's operators")
        (link,) = bind_chain((shape,), context)
    return link


class _Refusing(torch.autograd.Function):
    """Returns the first ``count`` tensors, which cannot be differentiated, gradients for one.

    A derivative of them by any of ``tensors`` raises ``error``. Without this node torch would treat
    them as constants, and a penalty on gradients would silently train nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, error: Fp8CoreError, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.error = error
        return tuple(grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        # Another exception each time: one that the node refers to would refer to the node by its
        # traceback, and Python's collector does not see a circle through torch's graph.
        raise type(ctx.error)(*ctx.error.args)


def without_gradient(
    error: Fp8CoreError, tensors: Sequence[torch.Tensor], origins: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return ``tensors``, copies of ``origins`` without history, with one: backward raises
    ``error``."""
    guarded: tuple[torch.Tensor, ...] = _Refusing.apply(error, len(tensors), *tensors, *origins)  # type: ignore[no-untyped-call]  # torch's
    return guarded


def refusing(
    grads: Sequence[torch.Tensor | None],
    error: Fp8CoreError,
    node: Any,
    grad_outputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return ``grads`` as tensors whose derivatives raise ``error``.

    ``node`` computed them from ``grad_outputs``. ``torch.autograd.grad`` walks only the paths to
    the tensors it is given, so every leaf that ``node`` depends on is connected.
    """
    constants = [grad.detach().requires_grad_() for grad in grads if grad is not None]
    if not constants:
        return tuple(grads)
    origins = [*_leaves(node), *(origin for origin in grad_outputs if origin.requires_grad)]
    guarded = iter(_Refusing.apply(error, len(constants), *constants, *origins))  # type: ignore[no-untyped-call]  # torch's
    return tuple(None if grad is None else next(guarded) for grad in grads)


def gradients_once(
    compute: Callable[..., tuple[torch.Tensor | None, ...]],
    ctx: Any,
    grads: Sequence[torch.Tensor],
    owner: str,
) -> tuple[torch.Tensor | None, ...]:
    """Return ``compute(ctx, *grads)``; derivatives of it, where torch asks for any, are refused.

    torch's ``once_differentiable`` leaves them out silently if no gradient in ``grads`` has a
    history.
    """
    with torch.no_grad():
        computed = compute(ctx, *grads)
    if not torch.is_grad_enabled():
        return computed
    error = UnsupportedError(
        f"{owner}: a second derivative is not offered. Compute it from torch's own operators."
    )
    return refusing(computed, error, ctx, grads)


def _leaves(node: Any) -> list[torch.Tensor]:
    """Return the leaf tensors that the result of ``node`` depends on."""
    seen, left, leaves = {node}, [node], []
    while left:
        for before, _ in left.pop().next_functions:
            if before is None or before in seen:
                continue
            seen.add(before)
            left.append(before)
            if hasattr(before, "variable"):  # the node that accumulates the gradient of a leaf
                leaves.append(before.variable)
    return leaves


_TRANSFORMS = {
    "Vmap": "torch.func.vmap",
    "Grad": "torch.func.grad (vjp, jacrev)",
    "Jvp": "torch.func.jvp (jacfwd)",
    "Functionalize": "torch.func.functionalize",
}


def refuse_transform(x: torch.Tensor, role: str, instead: str) -> None:
    """Raise if a transform, or forward-mode differentiation, would have to see through a cast of
    ``x``; ``role`` is its name in messages, ``instead`` what to do.

    Raises:
        UnsupportedError: names the transform.
    """
    if not is_transformed():
        return
    transform = transform_of((x,))
    if transform is not None:
        raise UnsupportedError(
            f"{role} is under {transform}, which sees no derivative of a cast but the one that "
            f"backward takes. {instead}"
        )


def transform_of(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return the name of the transform that differentiates or batches ``tensors``, None if none."""
    stack = interpreter_stack()
    if stack:
        names = dict.fromkeys(interpreter.key().name for interpreter in stack)
        return " within ".join(_TRANSFORMS.get(name, name) for name in reversed(names))
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):  # type: ignore[no-untyped-call]  # torch's
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return None
