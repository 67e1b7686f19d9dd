"""The products of a linear whose operands are storages of the user's: by ``qgemm`` of its quantizer
or, where there is none, of their dequantized values.

Source of the call: Transformer Engine 2.20, pytorch/custom_recipes/gemm.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import GemmDesc, Operand
from fp8core.dispatch.table import Resolved
from fp8core.errors import OperandError
from fp8core.tensors.user_storage import QuantizedTensorStorage, StorageTensor


class GEMMType(enum.Enum):
    """Which product of a linear a ``qgemm`` computes."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class MMParams(NamedTuple):
    """How a ``qgemm`` is to compute: the dtype of its result, and whether it is to accumulate more
    accurately than the tensor cores do by themselves."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


_COLUMNWISE = {
    GEMMType.FPROP: (False, False),
    GEMMType.DGRAD: (False, True),
    GEMMType.WGRAD: (True, True),
}
"""Which operands of a product are columnwise."""


def of_storages(name: str, resolved: Resolved, dtype: torch.dtype, owner: str) -> Resolved:
    """Return fprop, dgrad or wgrad ``resolved``, of activations of ``dtype``, for operands one or
    both of which are storages."""
    desc, role = resolved.choice.desc, f"{owner}: {name}"
    assert isinstance(desc, GemmDesc)
    product = partial(_product, GEMMType(name), resolved.run, desc, dtype=dtype, role=role)
    return dataclasses.replace(resolved, run=product, recorder=None)


def _product(
    kind: GEMMType,
    run: Callable[..., Any],
    desc: GemmDesc,
    a: Operand,
    b: Operand,
    *,
    dtype: torch.dtype,
    role: str,
    **keywords: Any,
) -> Any:
    left, right = _storage_of(a, role), _storage_of(b, role)
    quantizer = None
    if left is not None and right is not None:
        quantizer = left._quantizer if left._quantizer is not None else right._quantizer
    if not callable(getattr(quantizer, "qgemm", None)):
        pairs = zip((a, b), _COLUMNWISE[kind], strict=True)
        return run(*[_dequantized(*pair, dtype, role) for pair in pairs], **keywords)
    assert left is not None
    assert right is not None
    sides = zip((left, right), _COLUMNWISE[kind], strict=True)
    (qx, sx), (qw, sw) = (_parts(*side, role) for side in sides)
    result = quantizer.qgemm(  # type: ignore[union-attr]  # it has one
        qx,
        qw,
        # As CustomRecipe has it, which names no way to accumulate in high precision.
        MMParams(desc.out_dtype, use_split_accumulator=kind is not GEMMType.FPROP),
        desc.out_dtype,
        sx,
        sw,
        keywords.get("bias"),
        gemm_type=kind,
        qresult_x=left,
        qresult_w=right,
    )
    size, device = (a.data.shape[0], b.data.shape[0]), a.data.device
    _check_result(result, size, desc.out_dtype, device, f"{role}: {type(quantizer).__name__}.qgemm")
    out = keywords.get("out")
    if out is None:
        # A copy: the user's next product may write to the same memory, as to a buffer of his own.
        return result.clone(memory_format=torch.contiguous_format)
    return out.add_(result) if desc.accumulate else out.copy_(result)


def _storage_of(operand: Operand, role: str) -> QuantizedTensorStorage | None:
    """Return the storage of ``operand``, None of a tensor in high precision.

    Raises:
        OperandError: its memory was written since the cast.
    """
    data = operand.data
    if not isinstance(data, StorageTensor):
        return None
    if data.codes.are_written:
        name = type(data.content).__name__
        raise OperandError(
            f"{role} reads {name}, whose tensors a later cast, or other code, has written: the "
            f"codes are those of something else. Have the quantizer make new tensors, and a new "
            f"{name}, in each call; what qgemm() returns may reuse its memory."
        )
    return data.content


def _parts(
    storage: QuantizedTensorStorage, is_columnwise: bool, role: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of ``storage``, as Transformer Engine names them."""
    names = ("data_t", "scale_t") if is_columnwise else ("data", "scale")
    parts = [getattr(storage, name, None) for name in names]
    for name, part in zip(names, parts, strict=True):
        if part is None:
            way = "columnwise" if is_columnwise else "rowwise"
            raise OperandError(
                f"{role} by qgemm() reads {name} of {type(storage).__name__}, which has none. Its "
                f"quantizer sets it where its attribute {way}_usage is True."
            )
    return parts[0], parts[1]  # type: ignore[return-value]  # neither is None


def _dequantized(operand: Operand, is_columnwise: bool, dtype: torch.dtype, role: str) -> Operand:
    """Return the value of ``operand``, turned if it ``is_columnwise``."""
    storage = _storage_of(operand, role)
    if storage is None:
        return operand
    name = type(storage).__name__
    dequantize = getattr(storage, "dequantize", None)
    if not callable(dequantize):
        raise OperandError(
            f"{role}: {name} has no dequantize(dtype=), and its quantizer no qgemm(), or the other "
            f"operand is in high precision, which qgemm() does not take. Give it one of them, and "
            f"quantize both operands for qgemm()."
        )
    value, size = dequantize(dtype=dtype), tuple(operand.data.shape)
    size = size[::-1] if is_columnwise else size
    _check_result(value, size, dtype, operand.data.device, f"{role}: {name}.dequantize")
    return Operand(value.t() if is_columnwise else value)


def _check_result(
    result: Any, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, role: str
) -> None:
    """Raise OperandError unless ``result`` is a plain tensor as it was asked for."""
    if type(result) is not torch.Tensor:
        raise OperandError(f"{role} returned {type(result).__name__}; expected a plain tensor.")
    if (tuple(result.shape), result.dtype, result.device) != (size, dtype, device):
        raise OperandError(
            f"{role} returned {result.dtype} {list(result.shape)} on {result.device}; expected "
            f"{dtype} {list(size)} on {device}."
        )
