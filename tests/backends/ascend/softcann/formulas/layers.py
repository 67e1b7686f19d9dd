"""Norms, activations and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests.backends.ascend.softcann.device import formula
from tests.backends.ascend.softcann.formulas.values import (
    T,
    decode,
    store,
)


@formula("aclnnRmsNorm")
def rms_norm(x: T, gamma: T, eps: float, y: T, rstd: T) -> None:
    values = decode(x)
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    store(rstd, factor)
    store(y, values * factor * decode(gamma))


@formula("aclnnRmsNormGrad")
def rms_norm_grad(grad: T, x: T, rstd: T, gamma: T, grad_x: T, grad_gamma: T) -> None:
    g, factor = decode(grad), rstd.values.reshape(*x.shape[:-1], 1)
    normed = decode(x) * factor
    store(grad_gamma, (g * normed).reshape(-1, x.shape[-1]).sum(0))
    g = g * decode(gamma)
    store(grad_x, factor * (g - normed * (g * normed).mean(-1, keepdim=True)))


@formula("aclnnSwiGlu")
def swiglu(x: T, dim: int, y: T) -> None:
    a, b = decode(x).chunk(2, dim)
    store(y, a * torch.sigmoid(a) * b)


@formula("aclnnSwiGluGrad")
def swiglu_grad(grad: T, x: T, dim: int, grad_x: T) -> None:
    a, b = decode(x).chunk(2, dim)
    g, s = decode(grad), torch.sigmoid(a)
    store(grad_x, torch.cat([g * b * (s + a * s * (1 - s)), g * a * s], dim))


def _gelu_form(approximate: Any) -> str:
    return "tanh" if approximate in (1, "tanh") else "none"


@formula("aclnnGeluV2")
def gelu(x: T, approximate: int, y: T) -> None:
    store(y, torch.nn.functional.gelu(decode(x), approximate=_gelu_form(approximate)))


@formula("aclnnGeluBackwardV2")
def gelu_backward(grad: T, x: T, approximate: str, grad_x: T) -> None:
    form = _gelu_form(approximate)
    store(grad_x, torch.ops.aten.gelu_backward(decode(grad), decode(x), approximate=form))


@formula("aclnnGeGluV3")
def geglu(x: T, dim: int, approximate: int, is_left: int, y: T, activated: T) -> None:
    assert is_left
    a, b = decode(x).chunk(2, dim)
    value = torch.nn.functional.gelu(a, approximate=_gelu_form(approximate))
    store(activated, value)
    store(y, value * b)


@formula("aclnnGeGluV3Backward")
def geglu_backward(*arguments: Any) -> None:
    grad, x, activated, dim, approximate, is_left, grad_x = arguments
    assert is_left
    a, b = decode(x).chunk(2, dim)
    g, form = decode(grad), _gelu_form(approximate)
    grad_a = torch.ops.aten.gelu_backward(g * b, a, approximate=form)
    store(grad_x, torch.cat([grad_a, g * decode(activated)], dim))


@formula("aclnnFastGelu")
def fast_gelu(x: T, y: T) -> None:
    store(y, decode(x) * torch.sigmoid(1.702 * decode(x)))


@formula("aclnnFastGeluBackward")
def fast_gelu_backward(grad: T, x: T, grad_x: T) -> None:
    values = decode(x)
    s = torch.sigmoid(1.702 * values)
    store(grad_x, decode(grad) * (s + 1.702 * values * s * (1 - s)))


@formula("aclnnSilu")
def silu(x: T, y: T) -> None:
    store(y, decode(x) * torch.sigmoid(decode(x)))


@formula("aclnnSiluBackward")
def silu_backward(grad: T, x: T, grad_x: T) -> None:
    s = torch.sigmoid(decode(x))
    store(grad_x, decode(grad) * (s + decode(x) * s * (1 - s)))


@formula("aclnnRelu")
def relu(x: T, y: T) -> None:
    store(y, torch.relu(decode(x)))


@formula("aclnnThresholdBackward")
def threshold_backward(grad: T, x: T, threshold: Any, grad_x: T) -> None:
    store(grad_x, torch.ops.aten.threshold_backward(decode(grad), decode(x), threshold))


@formula("aclnnLayerNorm")
def layer_norm(*arguments: Any) -> None:
    x, _shape, weight, bias, eps, y, mean, rstd = arguments
    values = decode(x)
    center = values.mean(-1, keepdim=True)
    values = values - center
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    store(mean, center)
    store(rstd, factor)
    result = values * factor * decode(weight)
    store(y, result if bias is None else result + decode(bias))


@formula("aclnnLayerNormBackward")
def layer_norm_backward(*arguments: Any) -> None:
    grad, x, _shape, mean, rstd, weight, _bias, asked, grad_x, grad_weight, grad_bias = arguments
    assert asked == [True, True, True]
    g, factor = decode(grad), rstd.values.reshape(-1, 1)
    normed = (decode(x) - mean.values.reshape(-1, 1)) * factor
    store(grad_weight, (g * normed).sum(0))
    store(grad_bias, g.sum(0))
    g = g * decode(weight)
    inner = g - normed * (g * normed).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)
    store(grad_x, factor * inner)
