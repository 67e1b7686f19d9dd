"""The seam between amax and cast: amaxes apart from their cast, and casts by given ones.

Both are what a cast does anyway, in a call each: a kernel writes the amaxes to a workspace, in the
layout of the contract, and the kernel of the cast reads them there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import (
    AmaxDesc,
    Amaxes,
    Operand,
    QuantizeByAmaxDesc,
    Quantized,
    QuantizeDesc,
    amax_extent,
    amax_sizes,
    has_amax,
    shares_amax,
    split_amax,
)
from fp8core_backends.cuda.device_groups import checked_offsets
from fp8core_backends.cuda.layout import DTYPES, adjacent_columns, wrong_dtype
from fp8core_backends.cuda.memory import allocator_now
from fp8core_backends.cuda.operations import first_problem, runs
from fp8core_backends.cuda.quantize import bind_quantize, cast_problem
from fp8core_backends.cuda.quantize_compose import in_groups
from fp8core_backends.cuda.stream import index_of, raw_stream


class _Amax:
    """The native call for the amax of a tensor, or of its rows and of its columns; or of groups."""

    __slots__ = ("_dtype", "_index", "_is_of_rows", "_native_amax", "_now", "_num_partials")

    def __init__(self, extent: str, dtype: torch.dtype, index: int, native: Any) -> None:
        self._is_of_rows = extent == "row"
        self._dtype = dtype
        self._index = index
        granularity = native.Granularity.__members__[extent]
        kind = native.InputType.__members__[DTYPES[dtype]]
        self._native_amax = native.Amax(granularity, kind, index)
        self._num_partials = native.MAX_PARTIALS
        self._now = allocator_now(index)

    def __call__(
        self, x: torch.Tensor, group_offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the entries of the rowwise orientation, of the columnwise one, and those of both,
        one behind the other or, where they are the same ones, once."""
        if x.dtype is not self._dtype:
            raise wrong_dtype("amax", x.dtype, self._dtype)
        rows, cols = x.shape
        x, stride = adjacent_columns(x)
        offsets_address, groups = 0, 1
        if group_offsets is not None:
            offsets, groups = checked_offsets(group_offsets, x.device)
            offsets_address = offsets.data_ptr()
        size = rows + groups * cols if self._is_of_rows else groups
        empty = self._now()
        amax = empty((max(size, 1),), (1,), torch.float32)
        workspace = empty((self._num_partials,), (1,), torch.float32)
        arguments = (
            x.data_ptr(),
            rows,
            cols,
            stride,
            workspace.data_ptr(),
            amax.data_ptr(),
            offsets_address,
            groups,
            0,  # the strides of scales and recorded amaxes, which there are none of
            0,
        )
        self._native_amax(arguments, raw_stream(self._index))
        if not self._is_of_rows:
            return amax, amax, amax
        return amax[:rows], amax[rows:size], amax if size else amax[:0]


def _amax_problem(desc: AmaxDesc) -> str | None:
    cast = desc.quantize
    specs = [spec for spec in (cast.rowwise, cast.columnwise) if spec is not None]
    return first_problem(
        (type(cast) is not QuantizeDesc, f"no amax of {type(cast).__name__}"),
        (cast.dtype not in DTYPES, f"no amax of {cast.dtype}"),
        (not has_amax(cast), "scales follow from their blocks alone: there is no amax"),
        (cast.offsets_on_device and not cast.grouped, "offsets without groups"),
        (
            any(spec.transform is not None for spec in specs),
            "no kernels for amaxes of transformed elements without their cast",
        ),
    )


@runs(AmaxDesc, refuses=_amax_problem, is_recorded=True)
def bind_amax(desc: AmaxDesc, device: torch.device, native: Any) -> Callable[..., torch.Tensor]:
    """Return the callable of ``desc``."""
    cast, index = desc.quantize, index_of(device)
    extents = [amax_extent(spec) for spec in (cast.rowwise, cast.columnwise)]
    present = [extent for extent in extents if extent is not None]
    calls = {extent: _Amax(extent, cast.dtype, index, native) for extent in present}
    dense = dataclasses.replace(cast, grouped=False, offsets_on_device=False)

    at = 2 if present == ["row", "row"] else extents.index(present[0])
    only = calls[present[0]] if len(calls) == 1 else None

    def run(x: torch.Tensor, *groups: torch.Tensor) -> torch.Tensor:
        if only is not None:  # what orientations share, or that of one
            return only(x, *groups)[at]
        parts = [calls[extent](x, *groups)[turned] for turned, extent in enumerate(present)]
        return torch.cat(parts)

    def of_groups(x: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
        each: list[Amaxes] = []
        for start, end in itertools.pairwise(group_offsets.tolist()):
            each.append(split_amax(dense, run(x[start:end]), end - start, x.shape[1]))
        parts = [group_amaxes.rowwise for group_amaxes in each if group_amaxes.rowwise is not None]
        if not shares_amax(cast):
            parts += [
                group_amaxes.columnwise
                for group_amaxes in each
                if group_amaxes.columnwise is not None
            ]
        return torch.cat(parts)

    chosen: Any = of_groups if cast.grouped and not cast.offsets_on_device else run
    chosen.kernel = "fp8core::directed_amax" if "row" in present else "fp8core::amax_partials"
    return chosen  # type: ignore[no-any-return]  # a function with an attribute


def _by_amax_problem(desc: QuantizeByAmaxDesc) -> str | None:
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    reason = first_problem(
        (desc.sums or desc.chunked, "no sums and no chunks by given amaxes"),
        (desc.padded, "no zeros behind rows that are cast by given amaxes"),
        (any(spec.delayed for spec in specs), "a delayed scale is given: it follows from no amax"),
        (not has_amax(desc), "scales follow from their blocks alone: there is no amax"),
        (
            any(spec.scale_format != "float32" for spec in specs),
            "two levels of scales take no amax from outside",
        ),
    )
    return reason or cast_problem(desc)


@runs(QuantizeByAmaxDesc, refuses=_by_amax_problem, is_recorded=True)
def bind_quantize_by_amax(
    desc: QuantizeByAmaxDesc, device: torch.device, native: Any
) -> Callable[..., Quantized]:
    """Return the callable of ``desc``."""
    cast = desc.plain()
    dense = _bind(cast, device, native)
    return in_groups(cast, dense) if cast.grouped and not cast.offsets_on_device else dense


def _bind(cast: QuantizeDesc, device: torch.device, native: Any) -> Callable[..., Quantized]:
    """Return the cast by given amaxes of a tensor, or of groups whose offsets are on the device."""
    if not cast.offsets_on_device:
        cast = dataclasses.replace(cast, grouped=False)
    if cast.rowwise is None or cast.columnwise is None or cast.rowwise == cast.columnwise:
        return _ByAmax(cast, device, native)
    rowwise, columnwise = (_ByAmax(half, device, native) for half in cast.halves())

    def run(
        x: torch.Tensor,
        *groups: torch.Tensor,
        amax: torch.Tensor,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        rows, cols = x.shape
        parts = split_amax(cast, amax, rows, cols, len(groups[0]) - 1 if groups else 1)
        # The rowwise cast alone counts NaN and inf: both casts read the same elements.
        row = rowwise(x, *groups, amax=parts.rowwise, nonfinite_out=nonfinite_out).rowwise
        return Quantized(row, columnwise(x, *groups, amax=parts.columnwise).columnwise)

    return run


class _ByAmax:
    """A cast by one spec, whose workspace holds the given amaxes; blocks of it need none."""

    __slots__ = ("_cast", "_desc", "_is_single", "kernel")

    def __init__(self, desc: QuantizeDesc, device: torch.device, native: Any) -> None:
        self._desc = desc
        # Whether a tensor of any size has one amax.
        self._is_single = sum(amax_sizes(desc, 2, 2)) == 1
        self._cast: Callable[..., Quantized] = bind_quantize(desc, device, native)
        self.kernel: str = self._cast.kernel  # type: ignore[attr-defined]  # of one spec it has one

    def __call__(
        self,
        x: torch.Tensor,
        *groups: torch.Tensor,
        amax: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        is_plain = self._is_single and amax is not None and not groups and x.numel()
        if is_plain and amax.shape == (1,) and amax.dtype is torch.float32:  # type: ignore[union-attr]
            return self._cast(x, amax=amax, nonfinite_out=nonfinite_out)
        if amax is None or not has_amax(self._desc):
            return self._cast(x, *groups, nonfinite_out=nonfinite_out)
        rows, cols = x.shape
        num_groups = len(groups[0]) - 1 if groups else 1
        parts = split_amax(self._desc, amax, rows, cols, num_groups)
        if not cols or not (rows or groups):
            return self._quantize_empty(x, parts, groups, num_groups)
        # Of no rows there are no amaxes; the kernel takes the address of a workspace all the same.
        workspace = amax.contiguous() if len(amax) else amax.new_zeros(1)
        if self._desc.rowwise is None and amax_extent(self._desc.columnwise) == "row":
            # The kernel looks for the amaxes of columns behind those of rows.
            workspace = torch.cat((workspace.new_zeros(rows), workspace))
        return self._cast(x, *groups, amax=workspace, nonfinite_out=nonfinite_out)

    def _quantize_empty(
        self, x: torch.Tensor, parts: Amaxes, groups: tuple[torch.Tensor, ...], num_groups: int
    ) -> Quantized:
        """Return operands without elements: kernels take one zero at least, which is cut off."""
        rows, cols = x.shape
        least = (max(rows, 1), max(cols, 1))
        sizes = amax_sizes(self._desc, *least, num_groups)
        entries = [
            torch.nn.functional.pad(part, (0, size - len(part)))
            for part, size in zip(parts, sizes, strict=True)
            if part is not None and size
        ]
        quantized = self(x.new_zeros(least), *groups, amax=torch.cat(entries))
        row, column = self._desc.rowwise, self._desc.columnwise
        rowwise = columnwise = None
        if quantized.rowwise is not None:
            data, scale_inv, _ = quantized.rowwise
            assert scale_inv is not None
            is_of_rows = amax_extent(row) == "row"
            rowwise = Operand(data[:rows, :cols], scale_inv[:rows] if is_of_rows else scale_inv)
        if quantized.columnwise is not None:
            data, scale_inv, _ = quantized.columnwise
            assert scale_inv is not None
            # In groups codes along k are more than there are rows, and no row was added.
            data = data[:cols] if groups else data[:cols, :rows]
            is_of_rows = amax_extent(column) == "row"
            columnwise = Operand(data, scale_inv[:cols] if is_of_rows else scale_inv)
        return Quantized(rowwise, columnwise)
