"""Rotation of queries and keys by the angles of their positions."""

from __future__ import annotations

import torch

from fp8core_backends.ascend.operators.arguments import check_rows
from fp8core_backends.ascend.operators.library import load


def rotary_mul(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Return ``x * cos + turned(x) * sin``; ``cos`` and ``sin`` have 1 where ``x`` has heads."""
    check_rows("npu_rotary_mul", x, cos, sin)
    y: torch.Tensor = load().npu_rotary_mul(
        x, cos, sin, rotary_mode="interleave" if interleaved else "half", rotate=None
    )
    return y


def rotary_mul_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Return the transposed map of :func:`rotary_mul`."""
    check_rows("npu_rotary_mul_backward", grad, cos, sin)
    mode = "interleave" if interleaved else "half"
    grad_x: torch.Tensor = load().npu_rotary_mul_backward(grad, grad, cos, sin, rotary_mode=mode)[0]
    return grad_x
