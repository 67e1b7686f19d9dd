"""LayerNorm and RMSNorm, in float32 throughout (float64 for float64), rounded once."""

from __future__ import annotations

import torch

from fp8core.backend_api import NormBackwardDesc, NormDesc

__all__ = ["norm", "norm_backward"]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return ``(y [rows, n], mean [rows] or None, rstd [rows])``; see the backend API."""
    values = x.to(_wide(desc.dtype))
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
    wide = weight.to(_wide(desc.dtype))
    return wide + 1.0 if desc.zero_centered else wide


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
    dtype = _wide(desc.norm.dtype)
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
