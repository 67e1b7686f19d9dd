"""RMSNorm and activations by torch_npu's kernels, in the activations' dtype.

Where the operands are of several dtypes, all become float32 first, which is exact.
"""

from __future__ import annotations

import torch

from fp8core.backend_api import (
    ActivationBackwardDesc,
    ActivationDesc,
    NormBackwardDesc,
    NormDesc,
)
from fp8core_backends.ascend import ops

__all__ = ["ACTIVATIONS", "activation", "activation_backward", "norm", "norm_backward"]

ACTIVATIONS = ("gelu", "swiglu")
"""The activations that torch_npu has kernels for, forward and backward."""


def norm(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return RMSNorm's ``(y [rows, n], None, rstd [rows])``; see the backend API."""
    if x.numel() == 0:
        rstd = torch.full(x.shape[:1], desc.eps**-0.5, dtype=torch.float32, device=x.device)
        return x.to(desc.out_dtype), None, rstd
    is_plain = x.dtype == weight.dtype == desc.out_dtype and not desc.zero_centered
    if is_plain:
        y, rstd = ops.rms_norm(x.contiguous(), weight.contiguous(), desc.eps)
    else:
        wide = x.to(torch.float32).contiguous()
        y, rstd = ops.rms_norm(wide, _gamma(desc, weight), desc.eps)
    return y.to(desc.out_dtype), None, rstd.reshape(-1)


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
    """Return RMSNorm's ``(grad_x, grad_weight, None)``; see the backend API."""
    if x.numel() == 0:
        return x.clone(), torch.zeros(weight.shape, dtype=torch.float32, device=x.device), None
    is_plain = x.dtype == grad_output.dtype == weight.dtype and not desc.norm.zero_centered
    if is_plain:
        grad, values, gamma = grad_output.contiguous(), x.contiguous(), weight.contiguous()
    else:
        grad, values = (one.to(torch.float32).contiguous() for one in (grad_output, x))
        gamma = _gamma(desc.norm, weight)
    grad_x, grad_weight = ops.rms_norm_backward(grad, values, gamma, rstd.reshape(-1, 1))
    return grad_x.to(desc.norm.dtype), grad_weight, None


def activation(desc: ActivationDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``y [rows, n]``; see the backend API."""
    values = (x if x.dtype == desc.out_dtype else x.to(torch.float32)).contiguous()
    if x.numel() == 0:
        rows, cols = x.shape
        return values.new_empty(
            rows, cols // 2 if desc.name == "swiglu" else cols, dtype=desc.out_dtype
        )
    run = ops.swiglu if desc.name == "swiglu" else ops.gelu
    return run(values).to(desc.out_dtype)


def activation_backward(
    desc: ActivationBackwardDesc, grad_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return ``grad_x`` of the shape of ``x``; see the backend API."""
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=desc.out_dtype)
    is_plain = x.dtype == grad_output.dtype == desc.out_dtype
    values, grad = (
        (one if is_plain else one.to(torch.float32)).contiguous() for one in (x, grad_output)
    )
    run = ops.swiglu_backward if desc.name == "swiglu" else ops.gelu_backward
    return run(grad, values).to(desc.out_dtype)
