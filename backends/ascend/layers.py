"""Norms and activations by torch_npu's kernels, in the activations' dtype.

Where the operands are of several dtypes, all become float32 first, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    NormBackwardDesc,
    NormDesc,
)
from fp8core_backends.ascend.operators import activations, norms


class _Kernels(NamedTuple):
    """``forward(x)`` and ``backward(grad, x)``."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


ACTIVATIONS = {
    "geglu": _Kernels(activations.geglu, activations.geglu_backward),
    "gelu": _Kernels(activations.gelu, activations.gelu_backward),
    "qgelu": _Kernels(activations.fast_gelu, activations.fast_gelu_backward),
    "relu": _Kernels(activations.relu, activations.relu_backward),
    "silu": _Kernels(activations.silu, activations.silu_backward),
    "swiglu": _Kernels(activations.swiglu, activations.swiglu_backward),
}
"""The activations that there are kernels for, forward and backward."""


def norm(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return ``(y [rows, n], mean [rows] or None, rstd [rows])``; see the backend API."""
    if x.numel() == 0:
        return _empty_norm(desc, x)
    if desc.kind == "layernorm":
        wide = (x if x.dtype == desc.out_dtype else x.to(torch.float32)).contiguous()
        shift = None if bias is None else bias.to(torch.float32).contiguous()
        y, mean, rstd = norms.layer_norm(wide, _gamma(desc, weight), shift, desc.eps)
        return y.to(desc.out_dtype), mean.reshape(-1), rstd.reshape(-1)
    is_plain = x.dtype == weight.dtype == desc.out_dtype and not desc.zero_centered
    if is_plain:
        y, rstd = norms.rms_norm(x.contiguous(), weight.contiguous(), desc.eps)
    else:
        wide = x.to(torch.float32).contiguous()
        y, rstd = norms.rms_norm(wide, _gamma(desc, weight), desc.eps)
    return y.to(desc.out_dtype), None, rstd.reshape(-1)


def _empty_norm(
    desc: NormDesc, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the norm of no elements: rows of none have the mean and the variance 0."""
    rows = (x.shape[0],)
    rstd = torch.full(rows, desc.eps**-0.5, dtype=torch.float32, device=x.device)
    is_centered = desc.kind == "layernorm"
    mean = torch.zeros(rows, dtype=torch.float32, device=x.device) if is_centered else None
    return x.to(desc.out_dtype, copy=True), mean, rstd


def _gamma(desc: NormDesc, weight: torch.Tensor) -> torch.Tensor:
    wide = weight.to(torch.float32)
    return (wide + 1 if desc.zero_centered else wide).contiguous()


def norm_backward(
    desc: NormBackwardDesc,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ``(grad_x, grad_weight, grad_bias or None)``; see the backend API."""
    is_centered = desc.norm.kind == "layernorm"
    if x.numel() == 0:
        zeros = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
        return x.clone(), zeros, zeros.clone() if is_centered else None
    if is_centered:
        assert mean is not None
        is_same = x.dtype == grad_output.dtype
        grad, values = (
            (tensor if is_same else tensor.to(torch.float32)).contiguous()
            for tensor in (grad_output, x)
        )
        statistics = (mean.reshape(-1, 1), rstd.reshape(-1, 1))
        gradients = norms.layer_norm_backward(grad, values, _gamma(desc.norm, weight), *statistics)
        return gradients[0].to(desc.norm.dtype), gradients[1], gradients[2]
    is_plain = x.dtype == grad_output.dtype == weight.dtype and not desc.norm.zero_centered
    if is_plain:
        grad, values, gamma = grad_output.contiguous(), x.contiguous(), weight.contiguous()
    else:
        grad, values = (tensor.to(torch.float32).contiguous() for tensor in (grad_output, x))
        gamma = _gamma(desc.norm, weight)
    grad_x, grad_weight = norms.rms_norm_backward(grad, values, gamma, rstd.reshape(-1, 1))
    return grad_x.to(desc.norm.dtype), grad_weight, None


def activation(desc: ActivationDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``y [rows, n]``; see the backend API."""
    values = (x if x.dtype == desc.out_dtype else x.to(torch.float32)).contiguous()
    if x.numel() == 0:
        rows, cols = x.shape
        return values.new_empty(
            rows, cols // 2 if desc.name in GATED else cols, dtype=desc.out_dtype
        )
    return ACTIVATIONS[desc.name].forward(values).to(desc.out_dtype)


def activation_backward(
    desc: ActivationBackwardDesc, grad_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return ``grad_x`` of the shape of ``x``; see the backend API."""
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=desc.out_dtype)
    # The operator of geglu's gradient takes gelu(a), which its other dtypes would round.
    is_plain = x.dtype == grad_output.dtype == desc.out_dtype and desc.name != "geglu"
    values, grad = (
        (tensor if is_plain else tensor.to(torch.float32)).contiguous()
        for tensor in (x, grad_output)
    )
    return ACTIVATIONS[desc.name].backward(grad, values).to(desc.out_dtype)
