"""LayerNorm and RMSNorm as links: a producer that hands its result over as the next link wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fp8core.chain.fusion import Fusion
from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import Backward, Call, Forward, Saved, Unadded, Want

__all__ = ["NormLink", "NormShape"]


class NormShape(NamedTuple):
    """What a norm is: ``kind`` ``"layernorm"`` or ``"rmsnorm"``, its width and its options."""

    kind: str
    size: int
    eps: float
    zero_centered: bool
    weight_dtype: torch.dtype

    @property
    def num_params(self) -> int:
        """``(weight, bias)``, or ``(weight,)`` for an RMSNorm."""
        return 2 if self.kind == "layernorm" else 1


@dataclass(frozen=True, slots=True, eq=False)
class NormLink:
    """Normalizes each row of ``x [rows, n]``; its parameters are ``(weight, bias)``.

    ``run_added`` adds a residual first, where a backend does both in one go: then the link before
    hands over the two :class:`Unadded`.
    """

    shape: NormShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    fusion: Fusion | None
    backward_fusion: Fusion | None
    run_added: Callable[..., Any] | None
    num_params: int
    needs_rng: bool = False
    only_once: ClassVar[OnlyOnce | None] = None

    def alone(self, rows: int, needs: Sequence[bool], call: Call) -> None:
        """There is no shorter way."""

    def wants(self, rows: int, needs: Sequence[bool], call: Call) -> None:
        """Take the tensor as it is."""

    def wants_grad(self, rows: int, needs: Sequence[bool], call: Call, context: object) -> None:
        """Take the gradient as it is."""

    def forward(
        self,
        x: Any,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Normalize; save the input and its statistics."""
        y: Any
        if isinstance(x, Unadded):
            assert self.run_added is not None
            x, y, mean, rstd = self.run_added(*x, *params)
            y = y if out is None else out(y)
        elif out is not None and self.fusion is not None and out.is_plain:
            y, mean, rstd = self.fusion(out, x, *params)
        else:
            y, mean, rstd = self.run(x, *params)
            y = y if out is None else out(y)
        if True not in needs:
            return Forward(y, ())
        return Forward(y, (x, params[0], mean, rstd))

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Compute the three gradients; those of the parameters are summed in float32."""
        grad_x: Any
        if out is not None and self.backward_fusion is not None and out.is_plain:
            grad_x, *grads = self.backward_fusion(out, grad, *saved)
            out = None
        else:
            grad_x, *grads = self.run_backward(grad, *saved)
        grad_params = [
            own.to(self.shape.weight_dtype) if needed else None
            for own, needed in zip(grads[: self.num_params], needs[1:], strict=True)
        ]
        if not needs[0]:
            return Backward(None, grad_params)
        return Backward(grad_x if out is None else out(grad_x), grad_params)
