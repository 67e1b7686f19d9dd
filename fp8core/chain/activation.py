"""Activations as links, gated or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fp8core.backend_api import ACTIVATIONS, GATED
from fp8core.chain.fusion import Fusion
from fp8core.chain.once import OnlyOnce
from fp8core.chain.protocol import Backward, Call, Forward, Saved, Want
from fp8core.errors import OperandError, RecipeError, did_you_mean

__all__ = ["GATED", "ActivationLink", "ActivationShape", "activation_shape"]

_PARAMS = {"clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}


class ActivationShape(NamedTuple):
    """Which activation, and its parameters in the order of :class:`ActivationDesc`."""

    name: str
    params: tuple[float, ...] = ()

    @property
    def num_params(self) -> int:
        """An activation has no parameters that are trained."""
        return 0

    @property
    def is_gated(self) -> bool:
        """Whether it takes twice as many columns as it gives."""
        return self.name in GATED


def activation_shape(name: str, params: dict[str, float] | None = None) -> ActivationShape:
    """Check an activation's name and parameters.

    Raises:
        RecipeError: an unknown name or parameter; lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise RecipeError(
            f"no activation is called {name!r}; activations: {', '.join(ACTIVATIONS)}."
            f"{did_you_mean(name, ACTIVATIONS)}"
        )
    defaults = _PARAMS.get(name, {})
    for given in params or {}:
        if given not in defaults:
            known = ", ".join(defaults) or "none"
            raise RecipeError(f"{name} has no parameter {given!r}; parameters: {known}.")
    values = {**defaults, **(params or {})}
    return ActivationShape(name, tuple(float(value) for value in values.values()))


@dataclass(frozen=True, slots=True, eq=False)
class ActivationLink:
    """``y [rows, n]`` from ``x [rows, n]``, or ``[rows, 2 n]`` for a gated one."""

    shape: ActivationShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    fusion: Fusion | None
    backward_fusion: Fusion | None
    num_params: int = 0
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
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        """Activate; save the input."""
        if self.shape.is_gated and x.shape[-1] % 2:
            raise OperandError(
                f"{self.shape.name}: input {list(x.shape)} has no two halves; expected an even "
                f"number of columns."
            )
        y: Any
        if out is not None and self.fusion is not None and out.is_plain:
            y = self.fusion(out, x)[0]
        else:
            y = self.run(x)
            y = y if out is None else out(y)
        return Forward(y, (x,) if needs[0] else ())

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        """Compute grad_x from the saved input."""
        if not needs[0]:
            return Backward(None, ())
        if out is not None and self.backward_fusion is not None and out.is_plain:
            return Backward(self.backward_fusion(out, grad, saved[0])[0], ())
        grad_x = self.run_backward(grad, saved[0])
        return Backward(grad_x if out is None else out(grad_x), ())
