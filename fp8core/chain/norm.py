"""LayerNorm and RMSNorm as links: a producer that hands its result over as the next link wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fp8core.backend_api import AddNormDesc, NormBackwardDesc, NormDesc
from fp8core.chain.call import Call
from fp8core.chain.fusion import Fusion, bind_fusion
from fp8core.chain.protocol import (
    Backward,
    Forward,
    GradientSum,
    Link,
    Out,
    Params,
    Recordable,
    Saved,
    TensorProgram,
    Unadded,
)
from fp8core.chain.request import Handover, QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.dispatch.table import Resolved


@dataclass(frozen=True, slots=True)
class NormShape(LinkShape):
    """The computation of a norm: ``kind`` ``"layernorm"`` or ``"rmsnorm"``, width and options."""

    kind: str
    size: int
    eps: float
    zero_centered: bool
    weight_dtype: torch.dtype

    @property
    def num_params(self) -> int:
        """``(weight, bias)``, or ``(weight,)`` for an RMSNorm."""
        return 2 if self.kind == "layernorm" else 1

    @property
    def widths(self) -> tuple[int, int]:
        """The columns that it normalizes."""
        return self.size, self.size

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, in which it computes."""
        return torch.float32

    def bind(self, context: BindContext) -> NormLink:
        """Return the link, which adds a residual where a backend does both in one go and no cast
        is fused: a fused cast writes less."""
        consumer = context.output_consumer
        out_dtype = context.dtype if consumer is None else consumer.dtype
        desc = NormDesc(self.kind, context.dtype, out_dtype, self.eps, self.zero_centered)
        backward_desc = NormBackwardDesc(desc)
        norm = context.resolve("norm", desc)
        backward = context.resolve("norm backward", backward_desc)
        is_remade = NormLink.result in context.plan.remade
        fusion = bind_fusion("norm", desc, consumer, context, is_remade=is_remade)
        gradient = context.grad_input_consumer
        backward_fusion = bind_fusion("norm backward", backward_desc, gradient, context)
        added = None
        if fusion is None and context.before is not None and context.before.shape.leaves_sum:
            backend = norm.choice.backend
            added = context.resolve_optional("norm of a sum", AddNormDesc(desc), backend)
        return NormLink(
            self,
            norm.run,
            backward.run,
            fusion,
            backward_fusion,
            None if added is None else added.run,
            self._summed_once(desc, context) or _adding(backward, context),
            self.num_params,
        )

    def _summed_once(self, desc: NormDesc, context: BindContext) -> Callable[..., Any] | None:
        """Return the backward that adds another gradient of the input before it rounds, where the
        input leaves the chain, of an RMSNorm alone, as in Transformer Engine.

        Source: Transformer Engine, ops/fused/backward_add_rmsnorm.py.
        """
        leaves = context.before is not None and context.before.shape.leaves_chain
        if not leaves or self.kind != "rmsnorm":
            return None
        wide = torch.promote_types(desc.dtype, torch.float32)
        wide_desc = NormBackwardDesc(replace(desc, dtype=wide, out_dtype=wide))
        run = context.resolve("norm backward", wide_desc).run

        def run_added(grad: Any, x: Any, *parameters: Any, added: Any) -> Sequence[Any]:
            grad_x, *grads = run(grad.to(wide), x.to(wide), *parameters)
            return (grad_x + added).to(added.dtype), *grads

        return run_added


def _adding(backward: Resolved, context: BindContext) -> Callable[..., Any] | None:
    """Return ``backward`` with another gradient of the input added, None if its backend has none
    that does."""
    desc, backend = backward.choice.desc, backward.choice.backend
    assert isinstance(desc, NormBackwardDesc)
    both = context.resolve_optional("norm backward", replace(desc, added=True), backend)
    return None if both is None else both.run


@dataclass(frozen=True, slots=True, eq=False)
class NormLink(Link):
    """Normalizes each row of ``x [rows, n]``; its parameters are ``(weight, bias)``.

    ``run_added`` adds a residual first, where a backend does both in one go: then the link before
    hands over the two :class:`Unadded`. ``run_backward_added`` adds a gradient at the end.
    """

    shape: NormShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    fusion: Fusion | None
    backward_fusion: Fusion | None
    run_added: Callable[..., Any] | None
    run_backward_added: Callable[..., Any] | None
    num_params: int = field()  # which has no default, unlike in Link
    keeps_input = True
    adds_gradient = True  # at once where the backend does
    result = "norm"

    @property
    def adds_residual(self) -> bool:
        """Whether a backend adds and normalizes at once."""
        return self.run_added is not None

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> NormProgram:
        """Return the program, which is the same for any number of rows."""
        return NormProgram(self, needs_grad)


class NormProgram(TensorProgram[NormLink]):
    """Normalizes; saves the input, its statistics and the parameters."""

    __slots__ = ()

    recordable = Recordable()

    def remade(self, saved: Saved, call: Call, out: QuantizeRequest) -> Handover:
        """Normalize again."""
        link, (x, weight, _, _, *bias) = self._link, saved
        handed = None if link.fusion is None else link.fusion.again(out, x, weight, *bias)
        return out(link.run(x, weight, *bias)[0]) if handed is None else handed

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y, of the sum where the link before left that to this one."""
        y: Any
        link = self._link
        if isinstance(x, Unadded):
            assert link.run_added is not None
            x, y, mean, rstd = link.run_added(*x, *params)
            y = y if out is None else out(y)
        elif out is not None and link.fusion is not None and link.fusion.serves(out, x.shape[0]):
            y, mean, rstd = link.fusion(out, x, *params)
        else:
            y, mean, rstd = link.run(x, *params)
            y = y if out is None else out(y)
        weight, *bias = params
        return y, (x, weight, mean, rstd, *bias) if True in self._needs_grad else (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out | GradientSum = None
    ) -> Backward:
        """Compute the three gradients; those of the parameters are summed in float32."""
        grad_x: Any
        link, needs, saved = self._link, self._needs_grad, saved[:4]
        fusion = link.backward_fusion
        if isinstance(out, GradientSum) and link.run_backward_added is not None:
            grad_x, *grads = link.run_backward_added(grad, *saved, added=out.added)
            out = None
        elif isinstance(out, QuantizeRequest) and fusion and fusion.serves(out, grad.shape[0]):
            grad_x, *grads = fusion(out, grad, *saved)
            out = None
        else:
            grad_x, *grads = link.run_backward(grad, *saved)
        grad_params = [
            total.to(link.shape.weight_dtype) if needed else None
            for total, needed in zip(grads[: link.num_params], needs[1:], strict=True)
        ]
        if not needs[0]:
            return (None, *grad_params)
        return (grad_x if out is None else out(grad_x), *grad_params)
