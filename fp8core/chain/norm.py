"""LayerNorm and RMSNorm as links: a producer that hands its result over as the next link wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fp8core.chain.call import Call
from fp8core.chain.fusion import Fusion
from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Out,
    Params,
    Saved,
    TensorProgram,
    Unadded,
)

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

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> NormProgram:
        """Return the program, which is the same for any number of rows."""
        return NormProgram(self, needs_grad)


class NormProgram(TensorProgram[NormLink]):
    """Normalizes; saves the input and its statistics."""

    __slots__ = ()

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return the input and the weight."""
        return saved[:2]

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y, of the sum where the link before left that to this one."""
        y: Any
        link = self._link
        if isinstance(x, Unadded):
            assert link.run_added is not None
            x, y, mean, rstd = link.run_added(*x, *params)
            y = y if out is None else out(y)
        elif out is not None and link.fusion is not None and out.is_plain:
            y, mean, rstd = link.fusion(out, x, *params)
        else:
            y, mean, rstd = link.run(x, *params)
            y = y if out is None else out(y)
        return y, (x, params[0], mean, rstd) if True in self._needs_grad else (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the three gradients; those of the parameters are summed in float32."""
        grad_x: Any
        link, needs = self._link, self._needs_grad
        if out is not None and link.backward_fusion is not None and out.is_plain:
            grad_x, *grads = link.backward_fusion(out, grad, *saved)
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
