"""Norms of rows, and their gradients."""

from __future__ import annotations

import torch

from fp8core_backends.ascend.operators.arguments import check_rows, check_scale, require
from fp8core_backends.ascend.operators.library import load


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x * rstd * weight`` and float32 ``rstd [rows, 1]``; x and weight have one dtype."""
    check_rows("npu_rms_norm", x, weight)
    y, rstd = load().npu_rms_norm(x, weight, epsilon=eps)
    return y, rstd


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of ``x``, and that of the weight in float32."""
    check_rows("npu_rms_norm_backward", x, grad, weight)
    grad_x, grad_weight = load().npu_rms_norm_backward(grad, x, weight, rstd)
    return grad_x, grad_weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(x - mean) * rstd * weight + bias``, and float32 mean and rstd ``[rows, 1]``.

    ``weight`` and ``bias`` are float32 or have the dtype of ``x [rows, n]``, both the same.
    """
    _check_layer_norm("native_layer_norm", x, weight, bias)
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, eps)
    return y, mean, rstd


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x``, of the weight and of a bias, those two in the weight's dtype.

    ``mean`` and ``rstd`` are float32 ``[rows, 1]``.
    """
    operator = "native_layer_norm_backward"
    _check_layer_norm(operator, x, weight, None)
    check_rows(operator, x, grad)
    for statistic in (mean, rstd):
        check_scale(operator, "a statistic", statistic, (x.shape[0], 1))
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, mean, rstd, weight, weight, [True, True, True]
    )
    return grad_x, grad_weight, grad_bias


def _check_layer_norm(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    check_rows(operator, x)
    parameters = [weight] if bias is None else [weight, bias]
    check_rows(operator, *parameters)
    is_supported = weight.dtype in (x.dtype, torch.float32)
    require(is_supported, operator, f"parameters in {weight.dtype} next to {x.dtype}")
    sizes = [list(parameter.shape) for parameter in parameters]
    is_row = all(size == [x.shape[-1]] for size in sizes)
    require(is_row, operator, f"parameters {sizes} for {list(x.shape)}")
