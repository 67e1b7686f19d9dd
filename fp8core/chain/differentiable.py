"""Links as torch differentiates them: under any transform, in any order, as often as it is asked.

In high precision the reference backend computes with torch's own operators alone. So a link bound
for it and run without the node of :mod:`fp8core.chain.run` is the torch expression of what the link
is, and there is no second one to keep in step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fp8core.chain.activation import ActivationLink
from fp8core.chain.bind import LinkShape, Site, bind_chain
from fp8core.chain.call import Call
from fp8core.chain.linear import LinearLink
from fp8core.chain.norm import NormLink, NormProgram
from fp8core.chain.once import OnlyOnce
from fp8core.chain.pointwise import AddLink
from fp8core.chain.protocol import Backward, Link, Program, Saved
from fp8core.chain.request import QuantizeRequest
from fp8core.dispatch import policy, table
from fp8core.errors import Fp8CoreError
from fp8core.recipe.plan import HIGH_PRECISION
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Binding
from fp8core.torch_ops.private import interpreter_stack

__all__ = ["Unfused", "arranged", "is_detached", "only_once", "transform_of", "twins"]


class Unfused(tuple[Link, ...]):
    """Links that hand plain tensors to each other, so that one node for all of them gains nothing.

    Each of ``pieces`` is a node of its own and saves what torch's would, the tensors themselves, so
    that second derivatives reach them. A piece is one link, or two that a backend runs as one.
    """

    pieces: tuple[Unfused, ...]

    def __new__(cls, links: Sequence[Link]) -> Unfused:
        """Take ``links``, none of which is ``only_once``."""
        self = super().__new__(cls, links)
        ends = [
            at + 1
            for at, link in enumerate(links)
            if not (isinstance(link, AddLink) and link.is_left_to_next)
        ]
        starts = [0, *ends[:-1]]
        is_piece = len(ends) == 1
        self.pieces = (
            (self,)
            if is_piece
            else tuple(Unfused(links[a:b]) for a, b in zip(starts, ends, strict=True))
        )
        return self


def arranged(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return ``links``, as :class:`Unfused` if torch's operators may take the place of each."""
    return links if only_once(links) else Unfused(links)


def only_once(links: Sequence[Link]) -> OnlyOnce | None:
    """Return what keeps torch's operators from taking the place of ``links``, if anything does."""
    return next((link.only_once for link in links if link.only_once is not None), None)


def converted(
    link: Link, params: Sequence[torch.Tensor], dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return the parameters of ``link`` with its weights as plain tensors of ``dtype``, converted
    by torch, which differentiates that."""
    if not isinstance(link, LinearLink):
        return params
    own = list(params)
    for at, weight in enumerate(own[: link.num_weights]):
        plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        own[at] = plain.to(dtype)
    return own


class _DifferentiableNorm(NormLink):
    """A norm whose statistics belong to the graph, too."""

    __slots__ = ()

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> NormProgram:
        """Return the program, which computes the statistics again in backward."""
        return _DifferentiableNormProgram(self, needs_grad)


class _DifferentiableNormProgram(NormProgram):
    __slots__ = ()

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: Any,
        call: Call,
        out: QuantizeRequest | None = None,
    ) -> Backward:
        """Compute the gradients from the saved input, and its statistics from that."""
        x, weight = saved[:2]
        _, mean, rstd = self._link.run(x, weight)
        return NormProgram.backward(self, grad, (x, weight, mean, rstd), context, call, out)


def twins(links: Sequence[Link], like: torch.Tensor) -> tuple[Link, ...]:
    """Return ``links`` for activations like ``like``, made of torch's operators."""
    return tuple(_twin(link, like) for link in links)


def _twin(link: Link, like: torch.Tensor) -> Link:
    if isinstance(link, LinearLink | NormLink | ActivationLink):
        return _bound(link.shape, like.device, like.dtype)
    return AddLink(link.shape) if isinstance(link, AddLink) else link


@functools.lru_cache(maxsize=4096)
def _bound(shape: LinkShape, device: torch.device, dtype: torch.dtype) -> Link:
    with policy.activated(policy.Policy(backend="reference")), table.in_eager():
        site = Site(HIGH_PRECISION, Binding(device, dtype), "torch's operators")
        (link,) = bind_chain((shape,), site)
    if isinstance(link, NormLink):
        return _DifferentiableNorm(
            link.shape, link.run, link.run_backward, None, None, None, num_params=link.num_params
        )
    return link


def is_detached(program: Program, saved: Saved, needs_grad: Sequence[bool]) -> bool:
    """Say whether ``saved``, what ``program`` saved, lacks the history of a tensor that has one.

    Padded, it is a copy. ``needs_grad`` says which of the input and the parameters have a history.
    """
    pairs = zip(program.origins(saved), needs_grad, strict=False)
    return any(need and own is not None and not own.requires_grad for own, need in pairs)


class _Refusing(torch.autograd.Function):
    """Hands the first ``count`` tensors on, gradients that have no derivatives of their own: to ask
    for one, by any of the tensors, raises ``error``.

    Without it they would count as constants, and a penalty on them would train nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, error: Fp8CoreError, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.error = error
        return tuple(grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        raise ctx.error


def refusing(
    grads: Sequence[torch.Tensor | None], error: Fp8CoreError, node: Any, grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return ``grads``, which ``node`` made of ``grad_output``, as tensors whose derivatives raise
    ``error``.

    By ``torch.autograd.grad`` too, which goes the ways alone that lead to what it is asked for.
    """
    made = [grad.detach().requires_grad_() for grad in grads if grad is not None]
    if not made:
        return tuple(grads)
    origins = [*_leaves(node), *([grad_output] if grad_output.requires_grad else ())]
    guarded = iter(_Refusing.apply(error, len(made), *made, *origins))  # type: ignore[no-untyped-call]  # torch's
    return tuple(None if grad is None else next(guarded) for grad in grads)


def _leaves(node: Any) -> list[torch.Tensor]:
    """Return the tensors without history that what ``node`` computed was made of."""
    seen, left, found = {node}, [node], []
    while left:
        for before, _ in left.pop().next_functions:
            if before is None or before in seen:
                continue
            seen.add(before)
            left.append(before)
            if hasattr(before, "variable"):  # it adds up the gradient of a leaf
                found.append(before.variable)
    return found


_TRANSFORMS = {
    "Vmap": "torch.func.vmap",
    "Grad": "torch.func.grad (vjp, jacrev)",
    "Jvp": "torch.func.jvp (jacfwd)",
    "Functionalize": "torch.func.functionalize",
}


def transform_of(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return which transform of torch is differentiating or batching ``tensors``, None if none."""
    stack = interpreter_stack()
    if stack:
        names = dict.fromkeys(interpreter.key().name for interpreter in stack)
        return " within ".join(_TRANSFORMS.get(name, name) for name in reversed(names))
    if any(forward_ad.unpack_dual(own).tangent is not None for own in tensors):  # type: ignore[no-untyped-call]  # torch's
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return None
