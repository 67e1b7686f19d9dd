"""Norms, activations, column sums and rotary embedding, in float32 throughout (float64 for
float64), rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    ATTENTION_LAYOUTS,
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    NormBackwardDesc,
    NormDesc,
    PackedRotaryDesc,
    RotaryDesc,
)
from fp8core_backends.reference.operations import FLOATS, computes, float_problem, wide


def _norm_problem(desc: NormDesc) -> str | None:
    kind = None if desc.kind in ("layernorm", "rmsnorm") else f"no norm {desc.kind!r}"
    double = torch.float64
    return kind or float_problem(desc.dtype, double) or float_problem(desc.out_dtype, double)


@computes(NormDesc, refuses=_norm_problem)
def norm(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return ``(y [rows, n], mean [rows] or None, rstd [rows])``; see the backend API."""
    values = x.to(wide(desc.dtype))
    mean = None
    if desc.kind == "layernorm":
        mean = values.mean(-1)
        values = values - mean[:, None]
    rstd = torch.rsqrt(values.square().mean(-1) + desc.eps)
    y = values * rstd[:, None] * _gamma(desc, weight)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(desc.out_dtype), mean, rstd


def _gamma(desc: NormDesc, weight: torch.Tensor) -> torch.Tensor:
    gamma = weight.to(wide(desc.dtype))
    return gamma + 1.0 if desc.zero_centered else gamma


@computes(NormBackwardDesc, refuses=lambda desc: _norm_problem(desc.norm))
def norm_backward(
    desc: NormBackwardDesc,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ``(grad_x, grad_weight, grad_bias or None)``; see the backend API.

    With ``z = (x - mean) * rstd`` and ``g = grad * gamma``: ``grad_x = rstd * (g - z * mean(g * z)
    - mean(g))``, the last term for LayerNorm alone.
    """
    dtype = wide(desc.norm.dtype)
    grad = grad_output.to(dtype)
    z = x.to(dtype)
    if mean is not None:
        z = z - mean[:, None]
    z = z * rstd[:, None]
    g = grad * _gamma(desc.norm, weight)
    grad_x = g - z * (g * z).mean(-1, keepdim=True)
    if mean is not None:
        grad_x = grad_x - g.mean(-1, keepdim=True)
    grad_x = (grad_x * rstd[:, None]).to(desc.norm.dtype)
    return grad_x, (grad * z).sum(0), None if mean is None else grad.sum(0)


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


def _erf_gelu_slope(x: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    slope: torch.Tensor = torch.special.ndtr(x) + x * density
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
# By the distribution function, which has the digits that 1 + erf loses far below 0.
_ERF_GELU = _Function(lambda x: x * torch.special.ndtr(x), _erf_gelu_slope)
_SIGMOID = _Function(torch.sigmoid, _sigmoid_slope)
_RELU = _Function(torch.relu, lambda x: (x > 0).to(x.dtype))
_SQUARED_RELU = _Function(lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x))

_PLAIN = {
    "erfgelu": _ERF_GELU,
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


def _activation_problem(desc: ActivationDesc | ActivationBackwardDesc) -> str | None:
    if desc.name not in NUM_PARAMS:
        return f"no activation {desc.name!r}"
    count = NUM_PARAMS[desc.name]
    params = None if len(desc.params) == count else f"{desc.name} takes {count} parameters"
    double = torch.float64
    return params or float_problem(desc.dtype, double) or float_problem(desc.out_dtype, double)


@computes(ActivationDesc, refuses=_activation_problem)
def activation(desc: ActivationDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``y [rows, n]``; see the backend API."""
    values = x.to(wide(x.dtype))
    if desc.name in _PLAIN:
        return _PLAIN[desc.name].value(values).to(desc.out_dtype)
    a, b = values.chunk(2, dim=-1)
    if desc.name in _GATED:
        return (_GATED[desc.name].value(a) * b).to(desc.out_dtype)
    limit, alpha, offset = desc.params
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (_CLAMPED[desc.name](alpha).value(a) * (b + offset)).to(desc.out_dtype)


@computes(ActivationBackwardDesc, refuses=_activation_problem)
def activation_backward(
    desc: ActivationBackwardDesc, grad_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return ``grad_x`` of the shape of ``x``; see the backend API."""
    grad, values = (each.to(wide(each.dtype)) for each in (grad_output, x))
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


def _sums_problem(desc: ColumnSumsDesc) -> str | None:
    is_float = desc.dtype in (*FLOATS, torch.float64)
    return None if is_float else f"no column sums of {desc.dtype}"


@computes(ColumnSumsDesc, refuses=_sums_problem)
def column_sums(desc: ColumnSumsDesc, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows of ``x [rows, n]``, ``[n]``; see the backend API."""
    return x.sum(0, dtype=wide(desc.dtype))


def _rotary_problem(desc: RotaryDesc) -> str | None:
    if desc.dtype not in (*FLOATS, torch.float64):
        return f"no rotary embedding of {desc.dtype}"
    return None if desc.layout in ATTENTION_LAYOUTS else f"no layout {desc.layout!r}"


@computes(RotaryDesc, PackedRotaryDesc, refuses=_rotary_problem)
def rotary(
    desc: RotaryDesc,
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``y`` of the shape of ``x``; see the backend API."""
    if cu_seqlens is None:
        is_token, positions = None, _positions(desc, x, start_positions)
    else:
        is_token, positions = _positions_in_sequences(x, start_positions, cu_seqlens)
    values = x.to(wide(x.dtype))
    angles = _angles(freqs.to(values.dtype), positions)
    size = angles.shape[-1]
    turned = _turned(desc, values[..., :size], angles)
    y = torch.cat((turned, values[..., size:]), dim=-1)
    if is_token is not None:
        y = torch.where(is_token[:, None, None], y, 0)
    return y.to(desc.dtype).contiguous()


def packed_rotary(
    desc: PackedRotaryDesc,
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    **sequences: torch.Tensor,
) -> torch.Tensor:
    """Return the heads of ``x`` and ``k``, rotated, and those of ``v``; see the backend API."""
    turned = rotary(desc.plain(), torch.cat((x, k), dim=-2), freqs, **sequences)
    return torch.cat((turned, v), dim=-2)


def _positions(desc: RotaryDesc, x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """Return positions ``[s, b]`` in sbhd, ``[b, s]`` in bshd; b is 1 without ``starts``."""
    positions = torch.arange(x.shape[desc.layout.index("s")], device=x.device)[None]
    if starts is not None:
        positions = positions + starts[:, None]
    return positions.t() if desc.layout == "sbhd" else positions


def _positions_in_sequences(
    x: torch.Tensor, starts: torch.Tensor | None, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the tokens ``[t]`` belong to a sequence, and their positions in it."""
    tokens = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
    # From -1, before the first sequence, to b, behind the last one, which both are indices.
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    is_token = (sequence >= 0) & (sequence < len(cu_seqlens) - 1)
    positions = tokens - cu_seqlens[sequence]
    if starts is not None:
        positions = positions + torch.nn.functional.pad(starts, (0, 1))[sequence]
    return is_token, positions


def _angles(freqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the angles ``[..., 1, r]`` of ``positions [...]``, NaN where ``freqs`` has none."""
    table = freqs.reshape(freqs.shape[0], freqs.shape[-1])
    table = torch.nn.functional.pad(table, (0, 0, 0, 1), value=torch.nan)
    is_valid = (positions >= 0) & (positions < freqs.shape[0])
    return table[torch.where(is_valid, positions, freqs.shape[0])].unsqueeze(-2)


def _turned(desc: RotaryDesc, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rotated by ``angles``, or the transposed map of it."""
    if desc.inverse:
        return x * angles.cos() - _quarter_turn(desc, x * angles.sin())
    return x * angles.cos() + _quarter_turn(desc, x) * angles.sin()


def _quarter_turn(desc: RotaryDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``(-x[j], x[i])`` for each pair ``(i, j)``."""
    if desc.interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
