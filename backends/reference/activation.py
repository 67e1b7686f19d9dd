"""Transformer Engine's activations and their derivatives, in float32, rounded once.

``f`` is the activation of one value. A gated activation splits its input in halves ``a, b`` and
gives ``f(a) * b``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8core.backend_api import ActivationBackwardDesc, ActivationDesc

__all__ = ["NUM_PARAMS", "activation", "activation_backward"]


class _Function(NamedTuple):
    """``value(x)`` and ``slope(x)``, its derivative."""

    value: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]


def _within(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Return ``x`` with ``bound`` in the place of larger finite values: a slope is constant there,
    and 0 times what overflows further on is NaN."""
    return torch.where(x.isfinite(), x.clamp(-bound, bound), x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    # torch's own backward of the tanh form, one pass instead of a dozen; it cubes x.
    x = _within(x, 2.0**40)
    slope: torch.Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")
    return slope


def _swish(beta: float) -> _Function:
    """``x sigmoid(beta x)``: SiLU for 1, QuickGELU for 1.702."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        x = _within(x, 2.0**126 / max(1.0, abs(beta)))
        s = torch.sigmoid(beta * x)
        return s + beta * x * s * (1 - s)

    return _Function(lambda x: x * torch.sigmoid(beta * x), slope)


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


_GELU = _Function(_gelu, _gelu_slope)
_SIGMOID = _Function(torch.sigmoid, _sigmoid_slope)
_RELU = _Function(torch.relu, lambda x: (x > 0).to(x.dtype))
_SQUARED_RELU = _Function(lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x))

_PLAIN = {
    "gelu": _GELU,
    "qgelu": _swish(1.702),
    "relu": _RELU,
    "srelu": _SQUARED_RELU,
    "silu": _swish(1.0),
}
_GATED = {
    "geglu": _GELU,
    "glu": _SIGMOID,
    "qgeglu": _swish(1.702),
    "reglu": _RELU,
    "sreglu": _SQUARED_RELU,
    "swiglu": _swish(1.0),
}
# Both halves are clamped: by params (limit, alpha, offset), x sigmoid(alpha x) of a, offset on b.
_CLAMPED: dict[str, Callable[[float], _Function]] = {"clamped_swiglu": _swish}

NUM_PARAMS = dict.fromkeys((*_PLAIN, *_GATED), 0) | dict.fromkeys(_CLAMPED, 3)
"""The activations that run here, and how many parameters each takes."""


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def activation(desc: ActivationDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``y [rows, n]``; see the backend API."""
    values = _wide(x)
    if desc.name in _PLAIN:
        return _PLAIN[desc.name].value(values).to(desc.out_dtype)
    a, b = values.chunk(2, dim=-1)
    if desc.name in _GATED:
        return (_GATED[desc.name].value(a) * b).to(desc.out_dtype)
    limit, alpha, offset = desc.params
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (_CLAMPED[desc.name](alpha).value(a) * (b + offset)).to(desc.out_dtype)


def activation_backward(
    desc: ActivationBackwardDesc, grad_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return ``grad_x`` of the shape of ``x``; see the backend API."""
    grad, values = _wide(grad_output), _wide(x)
    if desc.name in _PLAIN:
        return (grad * _PLAIN[desc.name].slope(values)).to(desc.out_dtype)
    a, b = values.chunk(2, dim=-1)
    if desc.name in _GATED:
        f = _GATED[desc.name]
        grad_a, grad_b = grad * b * f.slope(a), grad * f.value(a)
    else:  # the slope of a clamped value is 0
        limit, alpha, offset = desc.params
        f = _CLAMPED[desc.name](alpha)
        low, gate = a.clamp(max=limit), b.clamp(-limit, limit)
        grad_a = grad * (gate + offset) * f.slope(low) * (a <= limit)
        grad_b = grad * f.value(low) * ((b >= -limit) & (b <= limit))
    return torch.cat((grad_a, grad_b), dim=-1).to(desc.out_dtype)
