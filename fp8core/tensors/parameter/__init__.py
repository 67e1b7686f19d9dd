"""Parameters stored in low precision: how layers get them, and master copies to train them.

Layers constructed inside of ``quantized_model_init`` store their GEMM weights in low precision.
Transformer Engine's names of such tensors ask, by ``isinstance(weight, MXFP8Tensor)``, how one is
stored, and some construct one of codes and scales.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError, UnsupportedError
from fp8core.formats import format_of
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.checks import fit_codes
from fp8core.tensors.operators import with_room
from fp8core.tensors.parameter.master import MasterWeights
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Orientations
from fp8core.tensors.storage import is_square, matrix_shape, storage_plan
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
    plan and of its first spec, says yes to. ``constructor`` makes one of Transformer Engine's
    arguments, if any does."""

    describes: Callable[[TensorPlan, OperandSpec], bool]
    constructor: Callable[..., QuantizedTensor] | None = None

    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, QuantizedTensor):
            return False
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
        if cls.__dict__.get("constructor") is None:
            raise UnsupportedError(
                f"{cls.__name__} names a way to store a QuantizedTensor and has no constructor. "
                f"Use quantized_model_init, QuantizedTensor.quantize(value, plan) or "
                f"QuantizedTensor.from_codes(codes, scale_inv, recipe)."
            )
        tensor = cls.__dict__["constructor"](dtype or fake_dtype, **stored)
        sizes = (shape,) if isinstance(shape, int) else shape
        if sizes is not None and tuple(sizes) != tensor.shape:
            raise OperandError(
                f"{cls.__name__}(shape={list(sizes)}): its codes are those of "
                f"{list(tensor.shape)}. Give that shape, or None."
            )
        if device is not None and torch.device(device).type != tensor.device.type:
            raise OperandError(
                f"{cls.__name__}(device={device}): its codes are on {tensor.device}. Move them."
            )
        return tensor.requires_grad_(requires_grad)


def _stored(
    owner: str,
    spec: OperandSpec,
    rowwise: tuple[torch.Tensor, torch.Tensor] | None,
    columnwise: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    quantizer: Any,
) -> QuantizedTensor:
    """Return the tensor of codes and scales, ``[n, k]`` and ``[k, n]``, stored as ``spec``, or as
    ``quantizer`` stores, by which it is written then.

    Raises:
        OperandError: they do not fit one another, or hold what no cast writes.
        UnsupportedError: blocks do not divide the sizes.
    """
    if quantizer is not None:
        plan = getattr(quantizer, "plan", None)
        row, column = storage_plan(plan) if isinstance(plan, TensorPlan) else (None, None)
        chosen = row or column
        if chosen is None or _format(chosen) != _format(spec) or chosen.block != spec.block:
            raise OperandError(
                f"{owner}(quantizer={quantizer!r}): expected one that stores {spec}, or None."
            )
        spec = chosen
    nominal = torch.float32 if dtype is None else dtype
    try:
        first, second = (
            None if way is None else fit_codes(*way, spec, None, None, nominal)[0]
            for way in (rowwise, columnwise)
        )
    except OperandError as error:
        raise OperandError(f"{owner}: {error}") from None
    is_turned = second is None and is_square(spec)
    row, column = spec if first else None, spec if second or is_turned else None
    QuantizedTensor.check_sizes(shape, TensorPlan(row, column))
    tensor = QuantizedTensor(first, second, TensorPlan(row, column), nominal, shape=shape)
    return tensor.bound_to(getattr(quantizer, "slot", None))


def _codes(owner: str, *candidates: torch.Tensor | None) -> torch.Tensor:
    """Return the first of the codes that is there."""
    codes = next((each for each in candidates if each is not None), None)
    if not isinstance(codes, torch.Tensor) or not codes.dim():
        raise OperandError(f"{owner}: found {codes!r} for codes; expected a tensor [..., k].")
    return codes


def _of_codes_and_scale(
    dtype: torch.dtype | None,
    *,
    data: torch.Tensor | None = None,
    fp8_scale_inv: torch.Tensor | None = None,
    fp8_dtype: object = "e4m3",
    data_transpose: torch.Tensor | None = None,
    quantizer: Any = None,
) -> QuantizedTensor:
    """Return the tensor of codes ``data [..., k]`` of a byte and one scale.

    ``data_transpose [k, ...]`` are its transposed codes, for one without ``data`` or beside it.

    Raises:
        OperandError: codes, scale and quantizer do not fit, or there are no codes.
    """
    owner = "Float8Tensor"
    name, codes = format_of(fp8_dtype, owner), _codes(owner, data, data_transpose)
    if not isinstance(fp8_scale_inv, torch.Tensor):
        raise OperandError(f"{owner}: fp8_scale_inv is {fp8_scale_inv!r}; expected its scale.")
    shape = codes.shape if data is not None else (*codes.shape[1:], codes.shape[0])
    columnwise, matrix = None, matrix_shape(shape)[::-1]
    if data_transpose is not None:
        data_transpose = _codes(owner, data_transpose)
        if tuple(data_transpose.shape) not in (matrix, (shape[-1], *shape[:-1])):
            raise OperandError(
                f"{owner}: data_transpose {list(data_transpose.shape)} beside data {list(shape)}; "
                f"expected {list(matrix)}."
            )
        columnwise = data_transpose.reshape(matrix), fp8_scale_inv
    rowwise = None if data is None else (data, fp8_scale_inv)
    spec = OperandSpec(name, (0, 0), formats.by_name(name).max)
    return _stored(owner, spec, rowwise, columnwise, shape=shape, dtype=dtype, quantizer=quantizer)


def _of_codes_and_blocks(
    dtype: torch.dtype | None,
    *,
    rowwise_data: torch.Tensor | None = None,
    rowwise_scale_inv: torch.Tensor | None = None,
    columnwise_data: torch.Tensor | None = None,
    columnwise_scale_inv: torch.Tensor | None = None,
    fp8_dtype: object = "e4m3",
    quantizer: Any = None,
    with_gemm_swizzled_scales: bool = False,
) -> QuantizedTensor:
    """Return the tensor of codes ``[..., k]`` with a scale in a byte for each 32.

    ``rowwise_scale_inv [n, k / 32]`` and ``columnwise_scale_inv [n / 32, k]`` may be padded.
    Columnwise codes are copied, as they are stored transposed here.

    Raises:
        OperandError: codes, scales and quantizer do not fit, or there are no codes.
        UnsupportedError: the scales are in the order of cuBLAS.
    """
    owner = "MXFP8Tensor"
    name, codes = format_of(fp8_dtype, owner), _codes(owner, rowwise_data, columnwise_data)
    if with_gemm_swizzled_scales:
        raise UnsupportedError(
            f"{owner}(with_gemm_swizzled_scales=True) is not offered: scales are in the order of "
            f"their blocks here, and a product of CUDA orders them by itself."
        )
    rows, columns = matrix_shape(codes.shape)
    rowwise = columnwise = None
    if rowwise_data is not None:
        scales = _without_padding(owner, rowwise_scale_inv, (rows, -(-columns // 32)), (128, 4))
        rowwise = rowwise_data, scales
    if columnwise_data is not None:
        columnwise_data = _codes(owner, columnwise_data)
        if columnwise_data.shape != codes.shape:
            raise OperandError(
                f"{owner}: columnwise_data {list(columnwise_data.shape)} beside rowwise_data "
                f"{list(codes.shape)}; expected one shape."
            )
        scales = _without_padding(owner, columnwise_scale_inv, (-(-rows // 32), columns), (4, 128))
        turned = columnwise_data.reshape(rows, columns).t().contiguous()
        columnwise = turned, scales.t().contiguous()
    spec = OperandSpec(name, (1, 32), formats.by_name(name).max, "e8m0")
    return _stored(
        owner, spec, rowwise, columnwise, shape=codes.shape, dtype=dtype, quantizer=quantizer
    )


def _without_padding(
    owner: str, scales: torch.Tensor | None, size: tuple[int, int], steps: tuple[int, int]
) -> torch.Tensor:
    """Return the ``scales`` of ``size``, which may be padded to multiples of ``steps``."""
    padded = tuple(-(-length // step) * step for length, step in zip(size, steps, strict=True))
    if not isinstance(scales, torch.Tensor) or tuple(scales.shape) not in (size, padded):
        shown = list(scales.shape) if isinstance(scales, torch.Tensor) else repr(scales)
        raise OperandError(
            f"{owner}: scales {shown}; expected {list(size)}, or padded {list(padded)}."
        )
    return scales[: size[0], : size[1]].contiguous()


def of_parts(
    dtype: torch.dtype | None = None,
    *,
    rowwise_storage: QuantizedTensor | None = None,
    columnwise_storage: QuantizedTensor | None = None,
    quantizer: Any = None,
) -> QuantizedTensor:
    """Return the tensor of the rowwise operand of one part and the columnwise one of the other.

    ``quantizer`` is unused: the parts say how they are stored.

    Raises:
        OperandError: a part lacks its operand, or the parts differ in shape or device.
    """
    owner = "HybridQuantizedTensor"
    parts = {"rowwise": rowwise_storage, "columnwise": columnwise_storage}
    for way, part in parts.items():
        if part is not None and not (isinstance(part, QuantizedTensor) and getattr(part.plan, way)):
            raise OperandError(
                f"{owner}({way}_storage={part!r}): expected a QuantizedTensor that holds {way}."
            )
    storages = [part for part in parts.values() if part is not None]
    if len({(part.shape, part.device) for part in storages}) != 1:
        raise OperandError(f"{owner} of {parts}: expected a part, or two of one shape and device.")
    none = Orientations(None, None), TensorPlan(None, None)
    (rows, row), (columns, column) = (
        none if part is None else (part.operands, part.plan) for part in parts.values()
    )
    plan = TensorPlan(row.rowwise, column.columnwise)
    nominal, shape = dtype or storages[0].dtype, storages[0].shape
    return QuantizedTensor(rows.rowwise, columns.columnwise, plan, nominal, shape=shape)


class Float8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with one float32 scale: delayed and current scaling.

    ``Float8Tensor(shape=, dtype=, data=, fp8_scale_inv=, fp8_dtype=, data_transpose=, quantizer=)``
    returns the QuantizedTensor of codes ``data [..., k]``, which it holds without a copy.
    """

    constructor = staticmethod(_of_codes_and_scale)

    describes = staticmethod(lambda plan, spec: spec.block == (0, 0))


class MXFP8Tensor(QuantizedTensor, metaclass=_Name):
    """A QuantizedTensor with e8m0 scales: OCP microscaling.

    ``MXFP8Tensor(shape=, dtype=, rowwise_data=, rowwise_scale_inv=, columnwise_data=,
    columnwise_scale_inv=, fp8_dtype=, quantizer=)`` returns the QuantizedTensor of codes
    ``[..., k]`` in Transformer Engine's layout, whose scales may be padded.
    """

    constructor = staticmethod(_of_codes_and_blocks)

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
    """A QuantizedTensor whose two operands have different formats.

    ``HybridQuantizedTensor(rowwise_storage=, columnwise_storage=)`` returns the QuantizedTensor of
    the parts that ``rowwise_sub_storage`` and ``columnwise_sub_storage`` return.
    """

    constructor = staticmethod(of_parts)

    describes = staticmethod(
        lambda plan, spec: None not in plan and _format(plan.rowwise) != _format(plan.columnwise)
    )


def _format(spec: OperandSpec) -> tuple[object, ...]:
    return spec.format, spec.block[1], spec.scale_format


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
