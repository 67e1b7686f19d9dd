"""How a matrix is stored in low precision: its plan, and its operands as plain tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import INVERSES, DequantizeDesc, GemmDesc, OpDesc, Operand, OperandSpec
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.dispatch import table
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import Orientations, Slot
from fp8core.tensors.quantizer_binding import Binding, ReduceAmax, bind_quantizer
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.nonfinite import counter_of_writes
from fp8core.torch_ops.repeats import called_in_repeats

PARTS = tuple(f"_{way}_{part}" for way in ("rowwise", "columnwise") for part in Operand._fields)
"""The names of the plain tensors of a QuantizedTensor."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

StoredOperands: TypeAlias = "tuple[Operand | None, Operand | None]"
"""The rowwise and the columnwise operand of a QuantizedTensor, None for one that it does not hold,
or that is a view of the other."""


class Casting(NamedTuple):
    """How a value is cast, besides by its plan.

    ``slot`` has a delayed scale, and gets the amax. ``reduce_amax`` is as in
    :func:`~fp8core.tensors.quantizer_binding.bind_quantizer`: it reduces the amaxes, from which
    scales follow, over all parts of a tensor of which the value is one. With ``columns_of`` the
    columns are of the values that rows stored by it have; None: of the value itself.
    ``keeps_value``: the tensor also holds the value, for the orientation that its plan lacks, in
    ``value_dtype``, None for that of the value.
    """

    slot: Slot | None = None
    reduce_amax: ReduceAmax | None = None
    columns_of: OperandSpec | None = None
    keeps_value: bool = False
    value_dtype: torch.dtype | None = None


BY_VALUE = Casting()


def storage_plan(plan: TensorPlan) -> TensorPlan:
    """Return the plan by which a parameter stores a tensor that ``plan`` quantizes.

    A parameter's scale comes from the amax of the value written to it, so delayed and current
    scaling store the same operands. Two plans fit the same parameter if this is equal for both.
    """

    def stored(spec: OperandSpec | None) -> OperandSpec | None:
        if spec is None:
            return None
        return dataclasses.replace(spec, format=str(spec.format), delayed=False, cast_first=True)

    return TensorPlan(stored(plan.rowwise), stored(plan.columnwise))


def nearest(plan: TensorPlan) -> TensorPlan:
    """Return ``plan`` with elements rounded to the nearest."""
    row, column = (
        spec if spec is None or not spec.stochastic else dataclasses.replace(spec, stochastic=False)
        for spec in plan
    )
    return TensorPlan(row, column)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the size of the matrix as which a tensor of ``shape`` is stored: leading dimensions
    are rows; one of no dimension is a row of one element."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def counted(owner: str, shape: Any) -> tuple[int, ...]:
    """Return ``shape``, a number or several, as a tuple.

    Raises:
        OperandError: they are no counts.
    """
    try:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    except TypeError:
        sizes = (shape,)
    for size in sizes:
        if not isinstance(size, int | torch.SymInt) or isinstance(size, bool) or size < 0:
            raise OperandError(
                f"{owner}(shape={list(sizes)!r}): expected sizes, which are integers from 0 on."
            )
    return sizes


def steps(spec: OperandSpec, dim: int) -> tuple[int, int, int]:
    """Return of how many elements along ``dim``, 0 the rows of an operand and 1 its k, an entry is:
    of its codes, of its scales, and of the scales above; 0 where one entry is of all."""
    return codes_per_byte(spec) if dim else 1, spec.block[dim], int(spec.row_scaled and not dim)


def entries(size: int, step: int) -> int:
    """Return how many entries of ``step`` elements each, as by :func:`steps`, ``size`` need."""
    return -(-size // step) if step else 1


def split(parts: Sequence[torch.Tensor | None]) -> StoredOperands:
    """Return the operands whose ``parts`` are given in the order of :data:`PARTS`."""
    (row, *row_scales), (column, *column_scales) = parts[:3], parts[3:]
    return (
        None if row is None else Operand(row, *row_scales),
        None if column is None else Operand(column, *column_scales),
    )


def is_square(spec: OperandSpec) -> bool:
    """Say whether an operand of ``spec`` has the codes of the other orientation, transposed."""
    return spec.block[0] == spec.block[1] and codes_per_byte(spec) == 1


def turn(operand: Operand) -> Operand:
    """Return the transposed view of ``operand``."""
    return Operand(*(None if part is None else part.t() for part in operand))  # type: ignore[arg-type]  # data is there


def make_operands(
    value: torch.Tensor, plan: TensorPlan, casting: Casting = BY_VALUE
) -> Orientations:
    """Quantize ``value [n, k]`` by ``plan``, a result of :func:`storage_plan`.

    Stochastic rounding draws a seed from torch's CPU generator.
    """
    slot, reduce_amax, columns_of = casting[:3]
    if columns_of is not None and plan.columnwise is not None:
        rowwise = make_operands(value, TensorPlan(columns_of, None)).rowwise
        of_rows = decode_operand(rowwise, columns_of, value.dtype)
        columnwise = make_operands(of_rows, TensorPlan(None, plan.columnwise)).columnwise
        return Orientations(rowwise if plan.rowwise else None, columnwise)
    both = TensorPlan(plan.rowwise or plan.columnwise, plan.columnwise or plan.rowwise)
    if slot is not None:
        both = TensorPlan(*(spec and dataclasses.replace(spec, delayed=True) for spec in both))
    is_traced = value.is_meta or is_captured(value)  # a graph's casts count by themselves
    count = None if is_traced else counter_of_writes(value.device)
    binding = Binding(value.device, value.dtype)
    with _resolving_for(value):
        quantizer = bind_quantizer(
            both, value.dtype, binding, nonfinite=count, slot=slot, reduce_amax=reduce_amax
        )
    rng = None
    if any(spec is not None and spec.stochastic for spec in plan):
        rng = torch.randint(0, 2**62, (2,), device="cpu")
    return quantizer(
        value, rowwise=plan.rowwise is not None, columnwise=plan.columnwise is not None, rng=rng
    )


def stored_operands(operands: Orientations, plan: TensorPlan) -> StoredOperands:
    """Return the operands to store; no columnwise one where it is a view of the rowwise one."""
    rowwise, columnwise = operands
    if rowwise is None or columnwise is None or rowwise.data.is_meta:
        return rowwise, columnwise
    if is_captured(rowwise.data):  # no address
        return rowwise, None if _is_turned(operands, plan) else columnwise
    pairs = [(a, b) for a, b in zip(rowwise, columnwise, strict=True) if a is not None]
    is_view = all(a.numel() and a.data_ptr() == b.data_ptr() for a, b in pairs)
    return rowwise, None if is_view else columnwise


def _is_turned(operands: Orientations, plan: TensorPlan) -> bool:
    """Say by spec and strides whether the columnwise codes are a view of the rowwise ones."""
    spec = plan.rowwise
    if spec is None or spec != plan.columnwise or not is_square(spec):
        return False
    return bool(operands.columnwise.data.stride() == operands.rowwise.data.t().stride())


OUTSIDE_OF_INIT = (
    "Make this layer outside quantized_model_init, or inside quantized_model_init(enabled=False)."
)


def check_parameter(
    plan: TensorPlan, shape: tuple[int, ...], remedy: str = OUTSIDE_OF_INIT
) -> None:
    """Raise UnsupportedError unless a parameter of ``shape`` can be stored by ``plan``; ``remedy``
    says what to do if its sizes do not fit."""
    subject = f"a parameter {list(shape)} stored as {plan.rowwise}"
    if plan.rowwise is None:
        raise UnsupportedError(f"{subject}: the recipe leaves its weight in high precision.")
    for spec in filter(None, plan):
        if spec.stochastic or spec.transform is not None:
            raise UnsupportedError(
                f"{subject}: {spec} is not for parameters; they round to nearest."
            )
        block, is_whole = _whole_along_k(spec), plan.columnwise is not None
        if any(size % block for size in (shape if is_whole else shape[-1:])):
            sizes = "both sizes" if is_whole else "columns"
            raise UnsupportedError(f"{subject}: {sizes} must be multiples of {block}. {remedy}")


def check(plan: TensorPlan, rows: int, columns: int) -> None:
    """Raise UnsupportedError unless a tensor ``[rows, columns]`` can be stored by ``plan``."""
    sizes = ((rows, columns), (columns, rows))
    for way, spec, size in zip(("rowwise", "columnwise"), plan, sizes, strict=True):
        if spec is None:
            continue
        needed = [1 if spec.scale_format == "float32" else spec.block[0], _whole_along_k(spec)]
        if any(length % step for length, step in zip(size, needed, strict=True)):
            order = needed if way == "rowwise" else needed[::-1]
            raise UnsupportedError(
                f"a tensor of {rows} x {columns} stored {way} as {spec}: its rows must be "
                f"multiples of {order[0]}, its columns of {order[1]}. Pad it with zeros, or store "
                f"the other orientation alone: set_usage({way}=False)."
            )


def _whole_along_k(spec: OperandSpec) -> int:
    """Return the number of which k must be a multiple: byte scales have no partial blocks."""
    return spec.block[1] if spec.scale_format != "float32" else codes_per_byte(spec)


def decode_operand(operand: Operand, spec: OperandSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return the values ``[rows, k]`` of ``operand`` in ``dtype``, rounded once from float32.

    Values of a transformed operand are transformed back, which is exact but for rounding.
    """
    if spec.transform is not None:
        transformed = resolve_for(DequantizeDesc(spec), operand.data).run(operand)
        return INVERSES[spec.transform](transformed).to(dtype)
    desc = DequantizeDesc(spec, dtype if dtype in FLOATS else torch.float32)
    values: torch.Tensor = resolve_for(desc, operand.data).run(operand)
    return values.to(dtype)


def resolve_for(desc: OpDesc, x: torch.Tensor) -> table.Resolved:
    """Bind ``desc`` where ``x`` is, to an operator if ``x`` stands for a tensor of a graph."""
    with _resolving_for(x):
        return table.resolve(desc, x.device)


def _resolving_for(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Have operations resolve to operators if ``x`` stands for a tensor of a graph.

    torch dispatches to such tensors with is_compiling() off, and a kernel would read their address.
    """
    return table.capturing() if is_captured(x) else contextlib.nullcontext()


def pad_operand(operand: Operand, spec: OperandSpec, rows: int, columns: int) -> Operand:
    """Return ``operand`` with ``rows`` and ``columns`` of zero codes added at its ends.

    New blocks get a finite scale: 1 for float32 scales, code 0 for scales of a byte. Tensors to
    which nothing is added are those of ``operand``.
    """
    packed = codes_per_byte(spec)
    sizes = operand.data.shape[0] + rows, (operand.data.shape[1] + columns // packed) * packed
    fills = 0, 1 if spec.scale_format == "float32" else 0, 1
    ways = zip(steps(spec, 0), steps(spec, 1), strict=True)
    parts: list[torch.Tensor | None] = []
    for part, along, fill in zip(operand, ways, fills, strict=True):
        if part is not None:
            counts = map(entries, sizes, along)
            more = [count - size for count, size in zip(counts, part.shape, strict=True)]
            if any(more):
                part = called_in_repeats(
                    partial(padded_with, added=(more[0], more[1]), value=fill), part
                )
        parts.append(part)
    return Operand(*parts)  # type: ignore[arg-type]  # data is there


def padded_with(x: torch.Tensor, added: tuple[int, int], value: int = 0) -> torch.Tensor:
    """Return ``x [n, k]`` with so many rows and columns of ``value`` at its ends, itself for none.

    torch's ``pad`` fills all of the memory first, and so writes half as much again. Rows that lie
    as far apart as those of the result, as columnwise codes of casts on CUDA, are copied at once
    with what is between them: the ends of rows would be copied element by element.
    """
    rows, columns = added
    if type(rows) is int and not (rows or columns):
        return x
    if is_captured(x):  # a compiler fuses it
        return torch.nn.functional.pad(x, (0, columns, 0, rows), value=value)
    n, k = x.shape
    padded = x.new_empty(n + rows, k + columns)
    end = x.storage_offset() + n * (k + columns)
    if x.stride() == padded.stride() and end * x.itemsize <= x.untyped_storage().nbytes():
        x = x.as_strided((n, k + columns), x.stride())
    padded[:n, : x.shape[1]] = x
    padded[n:] = value
    padded[:n, k:] = value
    return padded


def zeros_of_products(
    plan: TensorPlan, shape: Sequence[int], device: torch.device
) -> tuple[int, int]:
    """Return how many rows and columns of zeros a weight of ``shape [n, k]``, stored by ``plan``,
    needs in products on ``device``; none where they take its sizes, or no backend has one."""
    spec = plan.rowwise
    if spec is None or not all(takes_partial_blocks(each) for each in plan if each is not None):
        return 0, 0
    of_input = dataclasses.replace(spec, block=(min(spec.block[0], 1), spec.block[1]))
    try:
        desc = GemmDesc(of_input, spec, torch.bfloat16)
        _, n, k = table.resolve(desc, device).alignment
    except UnsupportedError:
        return 0, 0
    step = math.lcm(n, k)  # the columns of fprop are the rows of dgrad
    return -shape[0] % step, -shape[1] % step


def takes_partial_blocks(spec: OperandSpec | None) -> bool:
    """Say whether a tensor of any size has an operand of ``spec``, to which zeros can be added
    behind its cast: the cast then writes what it writes of a tensor with these zeros."""
    if spec is None or spec.scale_format != "float32" or codes_per_byte(spec) != 1:
        return False
    return spec.transform is None and not spec.stochastic
