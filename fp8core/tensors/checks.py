"""Plain tensors that a checkpoint or a caller brings: whether they are a matrix stored as planned.

Kernels read an operand by its address, so one that is smaller than its plan says has to be refused
before it becomes a QuantizedTensor.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import TRANSFORMS, Operand, OperandSpec
from fp8core.backend_api.descriptors import operand_shapes
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.errors import OperandError, RecipeError, checked_choice
from fp8core.recipe import Recipe
from fp8core.recipe.base import LINEAR_TENSORS, plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.storage import FLOATS, PARTS, is_square, split, storage_plan, turn
from fp8core.torch_ops.capture import has_no_values
from fp8core.torch_ops.private import FakeTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def matrix_size(parts: Sequence[Any], plan: TensorPlan) -> tuple[int, int]:
    """Return the size ``(n, k)`` of a matrix from its ``parts``, in the order of :data:`PARTS`.

    Looks at sizes and dtypes alone, which does not wait for a device.

    Raises:
        OperandError: a part does not fit ``plan``.
    """
    for error in _part_errors(parts, plan):
        raise OperandError(f"a QuantizedTensor stored as {plan.rowwise}: {error}.")
    return _size_of(parts, plan)


def _size_of(parts: Sequence[Any], plan: TensorPlan) -> tuple[int, int]:
    """Return ``(n, k)`` from the codes of the orientation that is held, the rowwise one first."""
    if plan.rowwise is not None:
        rows, packed = parts[0].shape
        return rows, packed * codes_per_byte(plan.rowwise)
    assert plan.columnwise is not None
    columns, packed = parts[3].shape
    return packed * codes_per_byte(plan.columnwise), columns


def check_stored(parts: Sequence[Any], plan: TensorPlan, dtype: Any) -> None:
    """Raise OperandError unless ``parts`` can be a saved QuantizedTensor of ``dtype``.

    Parts have to be plain tensors with memory for each element, and scales as casts write them.
    """
    error = fault_of(parts, plan)
    if error is None and dtype not in FLOATS:
        error = f"its dtype is {shown(dtype)}, expected float32, bfloat16 or float16"
    if error is not None:
        raise OperandError(f"a QuantizedTensor stored as {plan.rowwise}: {error}.")


def fault_of(parts: Sequence[Any], plan: TensorPlan) -> str | None:
    """Say why ``parts`` are no matrix stored as ``plan``; None if they are one.

    Looks at sizes, dtypes and scales, and waits for the device to read the scales.
    """
    checks = _part_errors(parts, plan), _memory_errors(parts), _scale_errors(parts, plan)
    return next(itertools.chain(*checks), None)


_texts = reprlib.Repr()
for _kind in _PLAIN:  # whose values may have no memory
    setattr(_texts, f"repr_{_kind.__name__}", lambda x, level: f"{x.dtype} {list(x.shape)}")
shown = _texts.repr


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Say whether the storage of a plain ``tensor`` is too small for its elements, or was freed.

    Reading such a tensor may crash the process.
    """
    if type(tensor) not in _PLAIN or tensor.is_meta or not tensor.numel():
        return False
    steps = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.storage_offset() + sum(steps) + 1
    return end * tensor.element_size() > tensor.untyped_storage().nbytes()


def kind_fault(value: Any) -> str | None:
    """Say why ``value`` of a checkpoint is no dense tensor; None if it is one."""
    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__} in the checkpoint, expected a tensor"
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout)
        return f"is {kind} in the checkpoint, expected a dense tensor"
    return None


def misfit(value: Any, target: torch.Tensor, *, replaces: bool = False) -> str | None:
    """Say why ``value`` of a checkpoint cannot be copied into ``target``; None if it can.

    ``replaces``: it is put in the stead of ``target`` instead.
    """
    kind = kind_fault(value)
    if kind is not None:
        return kind
    if value.shape != target.shape:
        return f"is {list(value.shape)} in the checkpoint, {list(target.shape)} here"
    if _kind_of(value) != _kind_of(target):
        return f"is {value.dtype} in the checkpoint, expected {_kind_of(target)}"
    if value.is_meta and not target.is_meta and not replaces:
        return "is on the meta device in the checkpoint, where it has no values"
    if lacks_memory(value):
        return "has no memory for its elements in the checkpoint, as where its storage was freed"
    if is_sharded(value) != is_sharded(target) and not replaces:
        return f"is a {type(value).__name__} in the checkpoint, a {type(target).__name__} here"
    return None


def _kind_of(tensor: torch.Tensor) -> str:
    """Return what the elements of ``tensor`` are, in words."""
    if tensor.is_complex() or tensor.dtype == torch.bool:
        return str(tensor.dtype)
    return "floating point" if tensor.is_floating_point() else "integers"


def is_sharded(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is a DTensor."""
    return hasattr(tensor, "device_mesh")  # a DTensor, whose class takes a second to import


def _part_errors(parts: Sequence[Any], plan: TensorPlan) -> Iterator[str]:
    """Yield the faults of sizes and dtypes, of which only the first is sure."""
    if plan == (None, None) or not isinstance(parts, Sequence) or len(parts) != len(PARTS):
        yield f"its parts are {shown(parts)}, expected {', '.join(PARTS)}"
    for name, part in zip(PARTS, parts, strict=True):
        if part is not None and not isinstance(part, torch.Tensor):
            yield f"{name} is {type(part).__name__}, expected a tensor"
    first = 0 if plan.rowwise is not None else 3
    data = parts[first]
    if data is None or data.is_nested or data.dim() != 2:
        yield f"{PARTS[first]} is {'missing' if data is None else 'no matrix'}"
    rowwise, columnwise = split(parts)
    size = _size_of(parts, plan)
    if plan.rowwise is None:
        for name, part in zip(PARTS[:3], parts[:3], strict=True):
            if part is not None:
                yield f"{name} is there, and is not planned"
    else:
        assert rowwise is not None
        yield from _operand_errors(PARTS[:3], rowwise, plan.rowwise, size)
        if columnwise is None and any(part is not None for part in parts[3:]):
            yield f"{PARTS[3]} is missing"
        if plan.columnwise is None and columnwise is not None:
            yield f"{PARTS[3]} is there, and is not planned"
    if plan.columnwise is None:
        return
    if columnwise is None:
        assert rowwise is not None
        columnwise = turn(rowwise)
    yield from _operand_errors(PARTS[3:], columnwise, plan.columnwise, size[::-1])
    if columnwise.data.device != data.device:
        yield f"{PARTS[3]} is on {columnwise.data.device}, {PARTS[first]} on {data.device}"


def _operand_errors(
    names: Sequence[str], operand: Operand, spec: OperandSpec, size: tuple[int, int]
) -> Iterator[str]:
    """Yield the faults of ``operand [rows, k]``, where ``size`` is ``(rows, k)``."""
    for name, part, want in itertools.zip_longest(names, operand, operand_shapes(spec, size)):
        if want is None or part is None:
            if (want is None) != (part is None):
                yield f"{name} is {'missing' if part is None else 'there, and is not planned'}"
            continue
        shape, dtype, _ = want
        if part.layout is not torch.strided or part.is_nested:
            yield f"{name} is {part.layout}, expected a dense tensor"
        elif tuple(part.shape) != shape or part.dtype != dtype:
            yield f"{name} is {part.dtype} {list(part.shape)}, expected {dtype} {list(shape)}"
        elif part.device != operand.data.device:
            yield f"{name} is on {part.device}, {names[0]} on {operand.data.device}"


def _memory_errors(parts: Sequence[torch.Tensor | None]) -> Iterator[str]:
    """Yield the parts that do not have memory for each of their elements.

    Tensor subclasses have no address; those that stand for plain tensors while torch traces pass.
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
        elif lacks_memory(part):
            yield f"{name} has no memory for its elements"


def _scale_errors(parts: Sequence[torch.Tensor | None], plan: TensorPlan) -> Iterator[str]:
    """Yield the parts with scales that no cast writes.

    Wrong scales are float32 numbers that are not positive and finite, and codes of NaN or negative
    values. Parts without values, on meta or while torch traces, pass.
    """
    for name, part in zip(PARTS, parts, strict=True):
        if part is None or name.endswith("_data") or has_no_values(part):
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
    """Return the plan whose fields ``stored`` holds, as a checkpoint has them.

    Raises:
        OperandError: ``stored`` holds something else, or a plan that is not for parameters.
    """
    reason = ""
    try:
        row, column = (
            None if fields is None else OperandSpec(**{**fields, "block": tuple(fields["block"])})
            for fields in stored
        )
        plan = TensorPlan(row, column)
        is_plan = plan != (None, None) and (row is None or row.transform is None)
        is_plan = is_plan and all(_is_stored(spec) for spec in plan if spec is not None)
        if is_plan and storage_plan(plan) == plan:
            return plan
    except RecipeError as error:  # such as a format that fp8core does not have
        reason = f" {error}"
    except (KeyError, OverflowError, TypeError, ValueError):
        pass
    raise OperandError(
        f"a stored QuantizedTensor is planned as {shown(stored)}, which no quantizer plans."
        f"{reason} The file is damaged, or of another version, or of a plug-in that is missing."
    )


def slot_from(stored: list[Any], device: torch.device) -> Slot:
    """Return the delayed scale and its amax that ``stored`` holds, as a checkpoint has them.

    Raises:
        OperandError: they are not two numbers in float32 on ``device``, the second of which may be
            None.
    """
    scale, amax = stored if len(stored) == 2 else (None, None)
    for entry in (scale, *([] if amax is None else [amax])):
        is_number = type(entry) in (*_PLAIN, FakeTensor) and not lacks_memory(entry)
        likeness = (entry.dtype, entry.shape, entry.device) if is_number else None
        if likeness != (torch.float32, (1,), device):
            raise OperandError(
                f"a stored QuantizedTensor has the delayed scale {shown(stored)}; expected a scale "
                f"and an amax, float32 [1] on {device}. The file is damaged."
            )
    assert scale is not None
    return Slot(scale.detach(), None if amax is None else amax.detach())


def value_from(stored: Any, tensor: Any) -> torch.Tensor:
    """Return the value in high precision that ``stored`` is, as a checkpoint or a caller has it, of
    ``tensor``.

    Raises:
        OperandError: it is no plain value of its size, or ``tensor`` lacks no orientation.
    """
    is_value = type(stored) in (*_PLAIN, FakeTensor) and not lacks_memory(stored)
    is_value = is_value and stored.is_floating_point() and stored.is_contiguous()
    is_value = is_value and None in tensor.plan
    if not is_value or stored.shape != tensor.shape or stored.device != tensor.device:
        raise OperandError(
            f"{tensor} has the value {shown(stored)}; expected a contiguous floating-point tensor "
            f"of its shape and device, for the orientation that it lacks. A file is damaged, of a "
            f"tensor take contiguous()."
        )
    value: torch.Tensor = stored.detach()
    return value


def _is_stored(spec: OperandSpec) -> bool:
    """Say whether an operand may be stored as ``spec``.

    Its blocks have to fit into 32 bits, its format and its transform have to be known, and its
    format may be rounded stochastically if it is.
    """
    element = formats.by_name(spec.format)
    return (
        max(spec.block) < 2**31
        and (not spec.stochastic or element.rounds_stochastically)
        and (spec.transform is None or spec.transform in TRANSFORMS)
    )


def tensor_plan(by: Any, tensor: str, dtype: torch.dtype) -> TensorPlan:
    """Return how ``by``, a recipe, its name, an OperandSpec or a TensorPlan, quantizes ``tensor``.

    Raises:
        RecipeError: it is none of these, leaves the tensor in high precision, or has an object of
            the user's quantize it.
    """
    checked_choice("quantize or from_codes", "tensor", tensor, LINEAR_TENSORS, RecipeError)
    plan: Any = by
    if isinstance(by, OperandSpec):
        plan = TensorPlan(by, by)
    elif isinstance(by, Recipe | str):
        recipe = recipe_from(by, "quantize")
        chosen = plan_of(LinearPlan, recipe, LayerRole(), dtype)
        assert isinstance(chosen, LinearPlan)
        plan, maker = chosen.tensors[tensor], dict(chosen.makers).get(tensor)
        if maker is not None:
            raise RecipeError(
                f"quantize or from_codes by {by!r}: {type(maker).__name__}, an object of the "
                f"user's, quantizes {tensor}. Call the object."
            )
    if not isinstance(plan, TensorPlan):
        raise RecipeError(
            f"{by!r} says not how to store a tensor: expected a quantizer, a recipe or its name, "
            f"an OperandSpec or a TensorPlan."
        )
    if plan == (None, None):
        raise RecipeError(
            f"quantize or from_codes by {by!r}: it leaves {tensor} in high precision."
        )
    return plan


def fit_codes(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    recipe: Any,
    global_scale_inv: torch.Tensor | None,
    tensor: str | None,
    dtype: torch.dtype,
) -> tuple[Operand, TensorPlan, list[int]]:
    """Return the operand of ``codes`` and scales, how it is stored, and the tensor's shape.

    The arguments are those of :meth:`fp8core.QuantizedTensor.from_codes`.

    Raises:
        RecipeError: ``recipe`` is none, or leaves the tensor in high precision.
        OperandError: codes and scales do not fit it, or hold what no cast writes.
    """
    data = bytes_of(codes, "codes")
    name = format_of_dtype(codes.dtype)
    scales, outer = bytes_of(scale_inv, "scale_inv"), global_scale_inv
    reasons = []
    for spec in _candidates(recipe, tensor, dtype):
        if name is not None and spec.format != name:
            reasons.append(f"{spec} has no codes in {codes.dtype}")
            continue
        fitted = _fitted(data, scales, outer, spec)
        if fitted is None:
            reasons.append(f"{spec} has no scales {scale_inv.dtype} {list(scale_inv.shape)}")
            continue
        plan = TensorPlan(spec, spec if is_square(spec) else None)
        check_stored([*fitted, *[None] * (len(PARTS) - 3)], plan, dtype)
        return fitted, plan, [*data.shape[:-1], data.shape[-1] * codes_per_byte(spec)]
    raise OperandError(
        f"from_codes of codes {codes.dtype} {list(codes.shape)}: {'; '.join(reasons)}."
    )


def bytes_of(x: Any, role: str) -> torch.Tensor:
    """Return ``x``, a plain tensor, as uint8 if its dtype is one of a byte.

    Raises:
        OperandError: it is none.
    """
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise OperandError(f"{role} is {type(x).__name__}; expected a plain tensor.")
    value: torch.Tensor = x.detach()
    return value.view(torch.uint8) if value.element_size() == 1 else value


def format_of_dtype(dtype: torch.dtype) -> str | None:
    """Return the format of one of torch's FP8 and FP4 dtypes, None for another dtype."""
    elements = filter(lambda each: 0.0 in each.values, map(formats.by_name, formats.names()))
    names = {element.stored_dtype: element.name for element in elements}  # e8m0 has no zero
    return names.get(dtype)


def _candidates(recipe: Any, tensor: str | None, dtype: torch.dtype) -> Iterator[OperandSpec]:
    """Yield the rowwise specs that a tensor may be stored by."""
    by_recipe = isinstance(recipe, Recipe | str) and tensor is None
    for name in LINEAR_TENSORS if by_recipe else (tensor or "input",):
        spec = storage_plan(tensor_plan(recipe, name, dtype)).rowwise
        if spec is not None:
            yield spec


def _fitted(
    data: torch.Tensor, scales: torch.Tensor, outer: torch.Tensor | None, spec: OperandSpec
) -> Operand | None:
    """Return the operand of matrices; None if the scales are not those of ``spec``."""
    rows, packed = math.prod(data.shape[:-1]), data.shape[-1] if data.dim() else 0
    _, inner, *above = operand_shapes(spec, (rows, packed * codes_per_byte(spec)))
    if scales.dtype != inner.dtype or scales.numel() != math.prod(inner.size) or not data.dim():
        return None
    if bool(above) != (outer is not None):
        return None
    if outer is not None:
        if outer.numel() != above[0].size[0]:
            return None
        outer = outer.detach().reshape(above[0].size)
    return Operand(data.reshape(rows, packed), scales.reshape(inner.size), outer)
