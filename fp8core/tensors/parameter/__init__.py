"""Parameters stored in low precision: how layers get them, and master copies to train them.

Layers constructed inside of ``quantized_model_init`` store their GEMM weights in low precision.
Transformer Engine's names of such tensors ask, by ``isinstance(weight, MXFP8Tensor)``, how one is
stored, and construct one of codes and scales.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError, UnsupportedError, no_argument
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.layouts import is_hybrid, kind_of
from fp8core.tensors.operators import with_room
from fp8core.tensors.parameter.constructed import (
    of_codes_and_scale,
    of_float32_blocks,
    of_mx_blocks,
    of_parts,
    of_two_levels,
)
from fp8core.tensors.parameter.master import MasterWeights
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import (
    BY_VALUE,
    OUTSIDE_OF_INIT,
    Casting,
    check_parameter,
    counted,
    matrix_shape,
    storage_plan,
)
from fp8core.tensors.user_storage import QuantizedTensorStorage
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

    Where backward takes the weight in high precision, it takes the dequantized one, as of a
    HybridQuantizer whose columnwise half is an IdentityQuantizer, of which Transformer Engine keeps
    the value too. A recipe that leaves its rows in high precision keeps a plain parameter.

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
    weight in high precision in forward; columns of it are cast in each step.

    Raises:
        OperandError: see :func:`parameter_dtype`.
        UnsupportedError: see :meth:`QuantizedTensor.quantize`; or the recipe has an object with a
            state or code of its own quantize the weight.
    """
    value = torch.empty(size, device=device, dtype=parameter_dtype(dtype))
    init = _thread.entered[-1] if _thread.entered else None
    if init is None or init._recipe is None:
        return torch.nn.Parameter(value)
    whole = plan_of(LinearPlan, init._recipe, role, value.dtype)
    plan, maker = whole.weight, dict(whole.makers).get("weight")
    casting = BY_VALUE if maker is None else getattr(maker, "_parameter_casting", None)
    if not isinstance(casting, Casting):
        raise UnsupportedError(
            f"quantized_model_init: the recipe has the weight of {role.kind} quantized by "
            f"{type(maker).__name__}, an object with a state or code of its own, and a stored "
            f"weight is written by its format alone. {OUTSIDE_OF_INIT}"
        )
    if plan.rowwise is None:
        return torch.nn.Parameter(value)
    if not torch.is_grad_enabled():
        plan = TensorPlan(plan.rowwise, None)
    check_parameter(storage_plan(plan), size)
    quantized = with_room(QuantizedTensor.of(value.zero_(), plan, casting))
    quantized._keeps_initial_value = init._keeps_initial_value
    return torch.nn.Parameter(quantized)


class _Name(TensorMeta):
    """A class of which every QuantizedTensor is an instance that ``describes``, a function of its
    plan and of its first spec, says yes to. ``constructor`` makes one of Transformer Engine's
    arguments."""

    describes: Callable[[TensorPlan, OperandSpec], bool]
    constructor: Callable[..., QuantizedTensor]

    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, QuantizedTensor):
            return False
        if instance._value is not None:
            return cls is HybridQuantizedTensor
        spec = instance.plan.rowwise or instance.plan.columnwise
        return spec is not None and cls.describes(instance.plan, spec)

    def __call__(
        cls,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        fake_dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
        **stored: Any,
    ) -> Any:
        owner = cls.__name__
        keywords = [*inspect.signature(cls.constructor).parameters][1:]
        for name in stored:
            if name not in keywords:
                raise OperandError(no_argument(owner, name, [*_COMMON, *keywords]))
        if None not in (dtype, fake_dtype) and dtype != fake_dtype:
            raise OperandError(
                f"{owner}(dtype={dtype}, fake_dtype={fake_dtype}): both are its nominal dtype. "
                f"Give one of them."
            )
        tensor = cls.constructor(dtype or fake_dtype, **stored)
        sizes = tuple(tensor.shape) if shape is None else counted(owner, shape)
        if matrix_shape(sizes) != matrix_shape(tensor.shape):
            raise OperandError(
                f"{owner}(shape={list(sizes)}): its codes are those of {list(tensor.shape)}. Give "
                f"that shape, or None."
            )
        if sizes != tensor.shape:
            tensor = tensor.rebuilt(*tensor.stored, sizes)
        if device is not None and not _is_on(tensor, torch.device(device)):
            raise OperandError(
                f"{owner}(device={device}): its codes are on {tensor.device}. Move them."
            )
        return tensor.requires_grad_(requires_grad)


_COMMON = ("shape", "dtype", "fake_dtype", "requires_grad", "device")


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Say whether ``tensor`` is on ``device``: on any of its type if that has no index."""
    if device.type != tensor.device.type or device.index is None:
        return device.type == tensor.device.type
    return device.index == (tensor.device.index or 0)


class Float8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with one float32 scale: delayed and current scaling.

    ``Float8Tensor(shape=, dtype=, data=, fp8_scale_inv=, fp8_dtype=, data_transpose=, quantizer=)``
    returns the QuantizedTensor of codes ``data [..., k]``, which it holds without a copy.
    """

    constructor = staticmethod(of_codes_and_scale)

    describes = staticmethod(lambda plan, spec: kind_of(spec) == "Float8Tensor")


class MXFP8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e8m0 scales: OCP microscaling.

    ``MXFP8Tensor(shape=, dtype=, rowwise_data=, rowwise_scale_inv=, columnwise_data=,
    columnwise_scale_inv=, fp8_dtype=, quantizer=)`` returns the QuantizedTensor of codes
    ``[..., k]`` in Transformer Engine's layout, whose scales may be padded.
    """

    constructor = staticmethod(of_mx_blocks)

    describes = staticmethod(lambda plan, spec: kind_of(spec) == "MXFP8Tensor")


class Float8BlockwiseQTensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with a float32 scale for every 1 x 128 or 128 x 128 elements.

    ``Float8BlockwiseQTensor(shape=, dtype=, rowwise_data=, rowwise_scale_inv=, columnwise_data=,
    columnwise_scale_inv=, fp8_dtype=, quantizer=, is_2D_scaled=)`` returns the QuantizedTensor of
    codes in Transformer Engine's layout, whose scales may be padded.
    """

    constructor = staticmethod(of_float32_blocks)

    describes = staticmethod(lambda plan, spec: kind_of(spec) == "Float8BlockwiseQTensor")


class NVFP4Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e4m3 scales under a float32 scale: NVIDIA's FP4.

    ``NVFP4Tensor(shape=, dtype=, rowwise_data=, rowwise_scale_inv=, columnwise_data=,
    columnwise_scale_inv=, amax_rowwise=, amax_columnwise=, fp4_dtype=, quantizer=)`` returns the
    QuantizedTensor of codes in Transformer Engine's layout, whose scales may be padded.
    """

    constructor = staticmethod(of_two_levels)

    describes = staticmethod(lambda plan, spec: kind_of(spec) == "NVFP4Tensor")


class HybridQuantizedTensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor whose two operands have different formats.

    ``HybridQuantizedTensor(rowwise_storage=, columnwise_storage=)`` returns the QuantizedTensor of
    the parts that ``rowwise_sub_storage`` and ``columnwise_sub_storage`` return, one of which may
    be a plain tensor, the value in high precision.
    """

    constructor = staticmethod(of_parts)

    describes = staticmethod(lambda plan, spec: is_hybrid(plan))


# Transformer Engine's bases of these classes, of which every such tensor is an instance.
# QuantizedTensorStorage is that of all.
Float8TensorStorage = Float8Tensor
MXFP8TensorStorage = MXFP8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
NVFP4TensorStorage = NVFP4Tensor
HybridQuantizedTensorStorage = HybridQuantizedTensor


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
