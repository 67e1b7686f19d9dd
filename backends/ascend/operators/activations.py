"""Activations, and their gradients."""

from __future__ import annotations

import torch

from fp8core_backends.ascend.operators.arguments import check_rows
from fp8core_backends.ascend.operators.library import load


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(x)``."""
    check_rows("silu", x)
    y: torch.Tensor = torch.ops.aten.silu(x)
    return y


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    check_rows("silu_backward", x, grad)
    grad_x: torch.Tensor = torch.ops.aten.silu_backward(grad, x)
    return grad_x


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` where it is positive, else 0."""
    check_rows("relu", x)
    y: torch.Tensor = torch.ops.aten.relu(x)
    return y


def relu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    check_rows("threshold_backward", x, grad)
    grad_x: torch.Tensor = torch.ops.aten.threshold_backward(grad, x, 0)
    return grad_x


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(1.702 * x)``."""
    check_rows("npu_fast_gelu", x)
    y: torch.Tensor = load().npu_fast_gelu(x)
    return y


def fast_gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    check_rows("npu_fast_gelu_backward", x, grad)
    grad_x: torch.Tensor = load().npu_fast_gelu_backward(grad, x)
    return grad_x


def geglu(x: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(a) * b`` of the halves of ``x [rows, 2 n]``, with GELU in its tanh form."""
    check_rows("npu_geglu", x)
    y: torch.Tensor = load().npu_geglu(x, dim=-1, approximate=1, activate_left=True)[0]
    return y


def geglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``, for which ``gelu(a)`` is computed again."""
    check_rows("npu_geglu_grad", x, grad)
    activated = gelu(x[..., : x.shape[-1] // 2].contiguous())
    grad_x: torch.Tensor = load().npu_geglu_grad(
        grad, x, activated, dim=-1, approximate=1, activate_left=True
    )
    return grad_x


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(a) * b`` of the halves of ``x [rows, 2 n]``."""
    check_rows("npu_swiglu", x)
    y: torch.Tensor = load().npu_swiglu(x, dim=-1)
    return y


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    check_rows("npu_swiglu_backward", x, grad)
    grad_x: torch.Tensor = load().npu_swiglu_backward(grad, x, dim=-1)
    return grad_x


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form."""
    check_rows("npu_gelu", x)
    y: torch.Tensor = load().npu_gelu(x, approximate="tanh")
    return y


def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    check_rows("npu_gelu_backward", x, grad)
    grad_x: torch.Tensor = load().npu_gelu_backward(grad, x, approximate="tanh")
    return grad_x
