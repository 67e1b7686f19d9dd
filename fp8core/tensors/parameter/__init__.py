"""Parameters stored in low precision: how layers get them, and master copies to train them.

Layers constructed inside of ``quantized_model_init`` store their GEMM weights in low precision.
Transformer Engine's names of such tensors ask, by ``isinstance(weight, MXFP8Tensor)``, how one is
stored; they have no other use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.operators import with_room
from fp8core.tensors.parameter.master import MasterWeights
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.private import TensorMeta

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MasterWeights",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "fp8_model_init",
    "quantized_model_init",
]


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes of parameters and activations; float64 computes in high precision alone."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[quantized_model_init] = []


_thread = _Thread()


class quantized_model_init(contextlib.ContextDecorator):
    """Context manager: GEMM weights of layers constructed inside are :class:`QuantizedTensor`.

    Biases and norms stay in high precision. ``init_method`` fills a high-precision tensor, which
    is then quantized. Nested uses are allowed, the innermost decides; it holds for the calling
    thread, and an exception ends it too. Such a layer runs under an ``autocast`` whose recipe
    stores weights in the same way; outside any it runs in high precision, on the dequantized
    weight.

    A weight that is created while gradients are off, under ``torch.no_grad()``, holds the operand
    of forward alone; a call that needs the gradient of its input is refused.

    Scales come from the amax of the value that is written, at init and later, also for
    DelayedScaling: its history of weight amaxes stays empty. A PerLayer recipe sees the ``name``
    that the layer's constructor gets, as :func:`fp8core.prepare` comes later.

    torch's DistributedDataParallel sends the values of the parameters when it wraps a model. The
    columnwise operands of blocks along k alone are rounded again then, equally on all ranks. To
    avoid it, broadcast each ``weight.data``, which sends codes, and pass ``init_sync=False``.

    Args:
        enabled: False stores weights in high precision.
        recipe: a Recipe whose weight formats are used, or its name; None takes
            :func:`fp8core.get_default_recipe`.
        preserve_high_precision_init_val: keep each initial value on the CPU, for
            ``weight.get_high_precision_init_val()``, until ``clear_high_precision_init_val()``.

    Raises:
        RecipeError: ``recipe`` is neither a Recipe nor the name of one.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | str | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        chosen = recipe_from(recipe, "quantized_model_init(recipe=...)")
        # None stores weights in high precision.
        self._recipe = (chosen or get_default_recipe()) if enabled else None
        self._keeps_initial_value = preserve_high_precision_init_val

    def __enter__(self) -> None:
        _thread.entered.append(self)

    def __exit__(self, *error: Any) -> None:
        _thread.entered.pop()


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """Return :class:`quantized_model_init` under Transformer Engine's older name."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def is_initializing_quantized() -> bool:
    """Return whether the calling thread is in a :class:`quantized_model_init` that is enabled."""
    return bool(_thread.entered) and _thread.entered[-1]._recipe is not None


def parameter_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype``, torch's default one if None.

    Raises:
        OperandError: no parameter can have it.
    """
    if dtype is None:
        return torch.get_default_dtype()
    if dtype not in DTYPES:
        raise OperandError(
            f"params_dtype={dtype!r}: expected torch.bfloat16, float16, float32 or float64. "
            f"quantized_model_init stores weights in low precision."
        )
    return dtype


def make_weight(
    size: tuple[int, int], device: torch.device, dtype: torch.dtype | None, role: LayerRole
) -> torch.nn.Parameter:
    """Return an unfilled weight ``[n, k]``, quantized inside :class:`quantized_model_init`.

    ``dtype`` is torch's default if None. It is a plain parameter if the recipe keeps this layer's
    weight in high precision.

    Raises:
        OperandError: see :func:`parameter_dtype`.
        UnsupportedError: see :meth:`QuantizedTensor.quantize`.
    """
    value = torch.empty(size, device=device, dtype=parameter_dtype(dtype))
    init = _thread.entered[-1] if _thread.entered else None
    if init is None or init._recipe is None:
        return torch.nn.Parameter(value)
    plan = plan_of(LinearPlan, init._recipe, role, value.dtype).weight
    if plan.rowwise is None and plan.columnwise is None:
        return torch.nn.Parameter(value)
    if not torch.is_grad_enabled():
        plan = TensorPlan(plan.rowwise, None)
    quantized = with_room(QuantizedTensor.quantize(value.zero_(), plan))
    quantized._keeps_initial_value = init._keeps_initial_value
    return torch.nn.Parameter(quantized)


class _Name(TensorMeta):
    """A class of which every QuantizedTensor is an instance that ``describes``, a function of its
    plan and of its first spec, says yes to."""

    describes: Callable[[TensorPlan, OperandSpec], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, QuantizedTensor):
            return False
        spec = instance.plan.rowwise or instance.plan.columnwise
        return spec is not None and cls.describes(instance.plan, spec)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{cls.__name__} names a way to store a QuantizedTensor and has no constructor. Use "
            f"quantized_model_init, or QuantizedTensor.quantize(value, plan)."
        )


class Float8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with one float32 scale: delayed and current scaling."""

    describes = staticmethod(lambda plan, spec: spec.block == (0, 0))


class MXFP8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e8m0 scales: OCP microscaling."""

    describes = staticmethod(lambda plan, spec: spec.scale_format == "e8m0")


class Float8BlockwiseQTensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with a float32 scale for every 1 x 128 or 128 x 128 elements."""

    describes = staticmethod(
        lambda plan, spec: spec.scale_format == "float32" and spec.block[1] == 128
    )


class NVFP4Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e4m3 scales under a float32 scale: NVIDIA's FP4."""

    describes = staticmethod(lambda plan, spec: spec.scale_format == "e4m3")


class HybridQuantizedTensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor whose two operands have different formats."""

    describes = staticmethod(
        lambda plan, spec: None not in plan and _format(plan.rowwise) != _format(plan.columnwise)
    )


def _format(spec: OperandSpec) -> tuple[object, ...]:
    return spec.format, spec.block[1], spec.scale_format


# Transformer Engine's bases of these classes, of which every such tensor is an instance.
QuantizedTensorStorage = QuantizedTensor
Float8TensorStorage = Float8Tensor
MXFP8TensorStorage = MXFP8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
NVFP4TensorStorage = NVFP4Tensor
HybridQuantizedTensorStorage = HybridQuantizedTensor


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
