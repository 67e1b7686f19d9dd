"""Functions on quantized and plain tensors, for those who build a computation of their own.

The operands are :class:`fp8core.QuantizedTensor`, as quantizers make them, and plain tensors. All
functions are differentiable; the backend that a layer would have computes.
"""

from __future__ import annotations

import functools

import torch
from typing_extensions import override

from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.shape import LinkShape
from fp8core.context.autocast import active
from fp8core.errors import OperandError, UnsupportedError
from fp8core.functional.product import gemm, grouped_gemm
from fp8core.functional.quantize import dequantize, from_codes, from_torch, quantize, to_torch
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.run import run_layer
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor

__all__ = [
    "dequantize",
    "from_codes",
    "from_torch",
    "gemm",
    "grouped_gemm",
    "linear",
    "quantize",
    "to_torch",
]
__dir__ = functools.partial(sorted, __all__)


class FunctionalLinear(LowPrecisionModule):
    """A linear without parameters, which come with the call; its links stay bound between calls."""

    kind = "linear"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(None)
        self.use_bias = shape.bias_dtype is not None
        self._shape = shape

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (self._shape,)


_layer_of = functools.lru_cache(maxsize=1024)(FunctionalLinear)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x w^T + bias`` in the precision of the active ``autocast``, as a Linear layer does.

    Tensors that are stored as the recipe casts are multiplied without another cast; all other
    tensors are quantized. Outside of autocast quantized tensors are multiplied by :func:`gemm`.

    Args:
        x: ``[..., k]``, quantized or plain.
        weight: ``[n, k]``, quantized or plain.
        bias: ``[n]``, or None.

    Raises:
        OperandError: a tensor does not fit.
        UnsupportedError: the recipe has delayed scales, for whose state there is no layer.
    """
    for role, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and (role != "bias" or tensor is not None):
            raise OperandError(f"linear: {role} is {type(tensor).__name__}; expected a tensor.")
    if weight.dim() != 2 or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:1])):
        bias_shape = "none" if bias is None else list(bias.shape)
        raise OperandError(
            f"linear: weight is {list(weight.shape)}, bias {bias_shape}; expected [n, k] and [n]."
        )
    settings = active(None)
    recipe = settings.quantize
    if recipe is None:
        if isinstance(x, QuantizedTensor) or isinstance(weight, QuantizedTensor):
            return gemm(x, weight, bias=bias)
    else:
        plan = plan_of(LinearPlan, recipe, LayerRole("linear"), x.dtype)
        if plan.delayed is not None:
            raise UnsupportedError(
                f"linear under {type(recipe).__name__}: delayed scales belong to a layer. Use "
                f"fp8core.Linear, or a recipe without state, such as Float8CurrentScaling."
            )
    n, k = weight.shape
    shape = LinearShape(k, n, weight.dtype, None if bias is None else bias.dtype)
    params = [weight] if bias is None else [weight, bias]
    return run_layer(_layer_of(shape), x, columns=k, params=params, like=weight)[0]
