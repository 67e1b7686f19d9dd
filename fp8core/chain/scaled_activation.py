"""Activations whose rows are multiplied by scales, and activations that torch's operators compute.

An expert's tokens have probabilities; ``activation(x) * probability`` is rounded once. A backend's
activation gives its float32 value, and its gradient in float32, which the scale multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import GATED, ActivationBackwardDesc, ActivationDesc
from fp8core.chain.call import Call
from fp8core.chain.gating import GatedShape
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    Out,
    Params,
    Saved,
    SavedList,
    TensorProgram,
)
from fp8core.chain.shape import BindContext, CallInputs
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError

Values: TypeAlias = "tuple[float, ...]"


class _InTorch(NamedTuple):
    """An activation by torch's operators in float32: ``value(x, params)``, and
    ``gradient(dy, x, params)``."""

    value: Callable[[torch.Tensor, Values], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor, Values], torch.Tensor]
    is_gated: bool


def _capped(x: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``cap tanh(x / cap)`` and its slope."""
    tanh = torch.tanh(x / cap)
    return cap * tanh, 1 - tanh.square()


def _situglu(x: torch.Tensor, params: Values) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return _capped(a, params[0])[0] * torch.sigmoid(a) * _capped(b, params[1])[0]


def _situglu_gradient(dy: torch.Tensor, x: torch.Tensor, params: Values) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(a)
    (low, low_slope), (high, high_slope) = _capped(a, params[0]), _capped(b, params[1])
    grad_a = dy * high * (low_slope * sigmoid + low * sigmoid * (1 - sigmoid))
    return torch.cat((grad_a, dy * low * sigmoid * high_slope), dim=-1)


def _tanh_srelu(x: torch.Tensor, params: Values) -> torch.Tensor:
    return _capped(torch.relu(x), params[0])[0].square()


def _tanh_srelu_gradient(dy: torch.Tensor, x: torch.Tensor, params: Values) -> torch.Tensor:
    value, slope = _capped(torch.relu(x), params[0])
    return dy * 2 * value * slope  # 0 where x is negative, as the value is


_IN_TORCH = {
    "situglu": _InTorch(_situglu, _situglu_gradient, is_gated=True),
    "tanh_srelu": _InTorch(_tanh_srelu, _tanh_srelu_gradient, is_gated=False),
}


@dataclass(frozen=True, slots=True)
class ScaledActivationShape(GatedShape):
    """The activation ``name`` with ``params``; with ``has_scales`` the call brings one for each
    row."""

    name: str
    params: Values = ()
    has_scales: bool = True

    @property
    def is_gated(self) -> bool:
        """Whether it takes twice as many columns as it gives."""
        known = _IN_TORCH.get(self.name)
        return self.name in GATED if known is None else known.is_gated

    @property
    def num_params(self) -> int:
        """The scales."""
        return int(self.has_scales)

    def example(self, x: torch.Tensor) -> CallInputs:
        """Return the scales."""
        scales = x.new_empty(x.shape[:1]).requires_grad_()
        return CallInputs((scales,) if self.has_scales else ())

    def bind(self, context: BindContext) -> ScaledActivationLink:
        """Return the link; a backend's activation computes in float32 and rounds nothing."""
        wide = torch.float64 if context.dtype == torch.float64 else torch.float32
        consumer, params = context.output_consumer, self.params
        out_dtype = context.dtype if consumer is None else consumer.dtype
        known = _IN_TORCH.get(self.name)
        if known is not None:
            value, gradient = known.value, known.gradient
            return ScaledActivationLink(
                self,
                lambda x: value(x.to(wide), params),
                lambda dy, x: gradient(dy.to(wide), x.to(wide), params),
                out_dtype,
                self.num_params,
            )
        desc = ActivationDesc(self.name, context.dtype, wide, params)
        backward = ActivationBackwardDesc(self.name, context.dtype, wide, params)
        return ScaledActivationLink(
            self,
            context.resolve(self.name, desc).run,
            context.resolve(f"{self.name} backward", backward).run,
            out_dtype,
            self.num_params,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ScaledActivationLink(Link):
    """``y = value(x) * scale`` of each row, where ``value`` is not rounded."""

    shape: ScaledActivationShape
    value: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    out_dtype: torch.dtype
    num_params: int = field()  # which has no default, unlike in Link

    def in_torch(self, bind: Callable[[Any], Any]) -> ScaledActivationLink:
        """Return the activation by torch's operators."""
        link: ScaledActivationLink = bind(self.shape)
        return link

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> ScaledActivationProgram:
        """Return the program, which is the same for any number of rows."""
        return ScaledActivationProgram(self, needs_grad)


class ScaledActivationProgram(TensorProgram[ScaledActivationLink]):
    """Activates and scales; saves the input and the scales."""

    __slots__ = ()

    def origins(self, saved: Saved) -> Sequence[torch.Tensor | None]:
        """Return the input and the scales."""
        return saved

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y.

        Raises:
            OperandError: an odd number of columns for two halves, or scales that are not one for
                each row.
        """
        link = self._link
        if link.shape.is_gated and x.shape[-1] % 2:
            raise link.shape.no_halves(x)
        y, shape = link.value(x), None
        saved: Saved = (x,)
        if params:
            shape = params[0].shape
            if params[0].numel() != x.shape[0]:
                raise OperandError(
                    f"{link.shape.name}: scales {list(shape)} for {x.shape[0]} rows; expected one "
                    f"for each row, of the shape of the input without its last dimension."
                )
            scales = unwrap(params[0], f"{link.shape.name}: the scales")
            y, saved = y * scales.reshape(-1, 1).to(y.dtype), (x, scales)
        y = y.to(link.out_dtype if out is not None else x.dtype)
        kept = saved if True in self._needs_grad else ()
        return y if out is None else out(y), kept, shape

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients of x, and of the scales, whose shape is ``context``."""
        link = self._link
        x, *rest = saved
        assert x is not None  # forward saved it
        scales = rest[0] if rest else None
        grad_x: Any = None
        grad_scales: torch.Tensor | None = None
        if self._needs_grad[0]:
            wide = link.gradient(grad.to(x.dtype), x)
            if scales is not None:
                wide = wide * scales.reshape(-1, 1).to(wide.dtype)
            grad_x = wide.to(x.dtype)
            grad_x = grad_x if out is None else out(grad_x)
        if scales is None:
            return (grad_x,)
        if self._needs_grad[1]:
            value = link.value(x)
            grad_scales = (value * grad.to(value.dtype)).sum(-1).to(scales.dtype).reshape(context)
        return grad_x, grad_scales
