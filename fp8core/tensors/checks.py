"""Whether plain tensors are the matrix that a plan describes: a checkpoint is not trusted.

Kernels read an operand by its address, so one that is smaller than its plan has to be refused
before it becomes a tensor.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError, RecipeError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.storage import FLOATS, PARTS, per_byte, split, storage_plan, turn
from fp8core.torch_ops.private import FakeTensor

__all__ = ["check_stored", "fault_of", "kind_fault", "matrix_size", "misfit", "plan_from"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def matrix_size(parts: Sequence[Any], plan: TensorPlan) -> tuple[int, int]:
    """Return the size ``(n, k)`` of the matrix whose ``parts``, named :data:`PARTS`, are stored as
    ``plan`` says. Looks at sizes and dtypes alone, which asks no device.

    Raises:
        OperandError: one of them does not fit.
    """
    error = _part_error(parts, plan)
    if error is not None:
        raise OperandError(f"a QuantizedTensor stored as {plan.rowwise}: {error}.")
    assert plan.rowwise is not None
    rows, packed = parts[0].shape
    return rows, packed * per_byte(plan.rowwise)


def check_stored(parts: Sequence[Any], plan: TensorPlan, dtype: Any) -> None:
    """Raise OperandError unless ``parts`` are what a QuantizedTensor of ``dtype`` is saved as:
    plain tensors with memory for each element, and scales as casts write them."""
    error = _part_error(parts, plan) or next(_memory_errors(parts), None)
    error = error or next(_scale_errors(parts, plan), None)
    if error is None and dtype not in FLOATS:
        error = f"its dtype is {reprlib.repr(dtype)}, expected float32, bfloat16 or float16"
    if error is not None:
        raise OperandError(f"a QuantizedTensor stored as {plan.rowwise}: {error}.")


def fault_of(parts: Sequence[Any], plan: TensorPlan) -> str | None:
    """Say what keeps ``parts``, named :data:`PARTS`, from being a matrix stored as ``plan``, in
    sizes, dtypes and scales; None if nothing does. Scales are read: a device is waited for."""
    error = _part_error(parts, plan) or next(_memory_errors(parts), None)
    return error or next(_scale_errors(parts, plan), None)


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """Say whether an element of ``tensor``, a plain one with a device, is outside its storage, as
    where that was freed: to read it may end the process."""
    if type(tensor) not in _PLAIN or tensor.is_meta or not tensor.numel():
        return False
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.storage_offset() + sum(steps) + 1
    return end * tensor.element_size() > tensor.untyped_storage().nbytes()


def kind_fault(value: Any) -> str | None:
    """Say why ``value`` is no tensor with an element for each of its places; None if it is one."""
    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__} in the checkpoint, expected a tensor"
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout)
        return f"is {kind} in the checkpoint, expected a dense tensor"
    return None


def misfit(value: Any, own: torch.Tensor, *, replaces: bool = False) -> str | None:
    """Say why ``value`` of a checkpoint cannot be copied into ``own``, or replace it; None if it
    can."""
    kind = kind_fault(value)
    if kind is not None:
        return kind
    if value.shape != own.shape:
        return f"is {list(value.shape)} in the checkpoint, {list(own.shape)} here"
    if not value.is_floating_point():
        return f"is {value.dtype} in the checkpoint, expected floating point"
    if value.is_meta and not own.is_meta and not replaces:
        return "is on the meta device in the checkpoint, where it has no values"
    if _lacks_memory(value):
        return "has no memory for its elements in the checkpoint, as where its storage was freed"
    if _is_sharded(value) != _is_sharded(own) and not replaces:
        return f"is a {type(value).__name__} in the checkpoint, a {type(own).__name__} here"
    return None


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # a DTensor; to import its class takes a second


def _part_error(parts: Sequence[Any], plan: TensorPlan) -> str | None:
    if plan.rowwise is None or not isinstance(parts, Sequence) or len(parts) != len(PARTS):
        return f"its parts are {reprlib.repr(parts)}, expected {', '.join(PARTS)}"
    for name, part in zip(PARTS, parts, strict=True):
        if part is not None and not isinstance(part, torch.Tensor):
            return f"{name} is {type(part).__name__}, expected a tensor"
    data = parts[0]
    if data is None or data.is_nested or data.dim() != 2:
        return f"{PARTS[0]} is {'missing' if data is None else 'no matrix'}"
    rowwise, columnwise = split(parts)
    size = data.shape[0], data.shape[1] * per_byte(plan.rowwise)
    error = next(_operand_errors(PARTS[:3], rowwise, plan.rowwise, size), None)
    if error is None and columnwise is None and any(part is not None for part in parts[3:]):
        error = f"{PARTS[3]} is missing"
    if error is None and plan.columnwise is None and columnwise is not None:
        error = f"{PARTS[3]} is there, and is not planned"
    if error is not None or plan.columnwise is None:
        return error
    turned = turn(rowwise) if columnwise is None else columnwise
    error = next(_operand_errors(PARTS[3:], turned, plan.columnwise, size[::-1]), None)
    if error is None and turned.data.device != data.device:
        error = f"{PARTS[3]} is on {turned.data.device}, {PARTS[0]} on {data.device}"
    return error


def _operand_errors(
    names: Sequence[str], operand: Operand, spec: OperandSpec, size: tuple[int, int]
) -> Iterator[str]:
    """Yield what is wrong with ``operand [rows, k]``, whose ``size`` that is."""
    rows, k = size
    counts = tuple(
        -(-own // block) if block else 1 for own, block in zip(size, spec.block, strict=True)
    )
    is_float, has_two_levels = spec.scale_format == "float32", spec.scale_format == "e4m3"
    wanted = (
        ((rows, k // per_byte(spec)), torch.uint8),
        (counts, torch.float32 if is_float else torch.uint8),
        ((1, 1), torch.float32) if has_two_levels else None,
    )
    for name, part, want in zip(names, operand, wanted, strict=True):
        if want is None or part is None:
            if (want is None) != (part is None):
                yield f"{name} is {'missing' if part is None else 'there, and is not planned'}"
            continue
        shape, dtype = want
        if part.layout is not torch.strided or part.is_nested:
            yield f"{name} is {part.layout}, expected a dense tensor"
        elif tuple(part.shape) != shape or part.dtype != dtype:
            yield f"{name} is {part.dtype} {list(part.shape)}, expected {dtype} {list(shape)}"
        elif part.device != operand.data.device:
            yield f"{name} is on {part.device}, {names[0]} on {operand.data.device}"


def _memory_errors(parts: Sequence[torch.Tensor | None]) -> Iterator[str]:
    """Yield which parts have no memory of their own for each element.

    Tensor subclasses have no address, but for the stand-ins of plain tensors while torch traces.
    """
    for name, part in zip(PARTS, parts, strict=True):
        if part is None:
            continue
        if type(part) not in (*_PLAIN, FakeTensor):
            yield f"{name} is {type(part).__name__}, expected a plain tensor"
        elif any(
            size > 1 and not step for size, step in zip(part.shape, part.stride(), strict=True)
        ):
            yield f"{name} is expanded, so that its elements share memory"
        elif _lacks_memory(part):
            yield f"{name} has no memory for its elements"


def _scale_errors(parts: Sequence[torch.Tensor | None], plan: TensorPlan) -> Iterator[str]:
    """Yield which parts hold what no cast writes: float32 scales that are not positive and finite,
    bytes that stand for NaN or less than zero. Parts without values pass."""
    for name, part in zip(PARTS, parts, strict=True):
        if part is None or name.endswith("_data") or part.is_meta or isinstance(part, FakeTensor):
            continue
        spec = plan.columnwise if name.startswith("_columnwise") else plan.rowwise
        assert spec is not None
        if part.dtype == torch.float32:
            if not bool((part.isfinite() & (part > 0)).all()):
                yield f"{name} holds scales that are NaN, infinite, zero or negative"
        else:
            codes = torch.arange(256, dtype=torch.uint8, device="cpu")
            values = formats.by_name(spec.scale_format).decode(codes)
            is_legal = (values.isfinite() & ~values.signbit()).to(part.device)
            if not bool(is_legal[part.long()].all()):
                yield f"{name} holds {spec.scale_format} codes that are NaN or negative"


def plan_from(stored: Any) -> TensorPlan:
    """Return the plan of which ``stored``, as a file has it, holds the fields.

    Raises:
        OperandError: they are not those of a plan for parameters.
    """
    try:
        row, column = (
            None if own is None else OperandSpec(**{**own, "block": tuple(own["block"])})
            for own in stored
        )
        plan = TensorPlan(row, column)
        is_plan = row is not None and all(_is_stored(spec) for spec in plan if spec is not None)
        if is_plan and storage_plan(plan) == plan:
            return plan
    except (KeyError, OverflowError, RecipeError, TypeError, ValueError):
        pass
    raise OperandError(
        f"a stored QuantizedTensor is planned as {reprlib.repr(stored)}, which no recipe plans for "
        f"a parameter. The file is damaged, or of another version."
    )


def _is_stored(spec: OperandSpec) -> bool:
    """Say whether a parameter's operand may be stored as ``spec``: sizes that a kernel's 32 bits
    hold, elements of a known format, rounded to the nearest, not transformed."""
    return (
        formats.by_name(spec.format).bits in (4, 8)
        and max(spec.block) < 2**31
        and not spec.stochastic
        and spec.transform is None
    )
