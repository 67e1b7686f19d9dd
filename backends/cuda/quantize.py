"""Quantization by the native kernels: codes and their transpose in one pass over the tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import (
    GROUP_STEP,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core_backends.cuda.device_groups import DeviceQuantize, PaddedGroups
from fp8core_backends.cuda.layout import (
    DTYPES,
    Slots,
    adjacent_columns,
    column_pitch,
    empty_codes,
    empty_scales,
    scale_mode,
    slots_of,
    spec_problem,
    wrong_dtype,
)
from fp8core_backends.cuda.memory import allocator, allocator_now
from fp8core_backends.cuda.microscaling import ByteScaled
from fp8core_backends.cuda.operations import first_problem, runs
from fp8core_backends.cuda.quantize_chunked import CHUNKED_MODES, QuantizeChunked
from fp8core_backends.cuda.quantize_compose import casts_groups, composed
from fp8core_backends.cuda.stream import index_of, raw_stream

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Looked up in every call, so here by one name each.
_UINT8, _FLOAT32, _SINGLE = torch.uint8, torch.float32, (1, 1)

# NamedTuples without their Python function: several in each cast.
_operand: Callable[[tuple[torch.Tensor, torch.Tensor, None]], Operand] = partial(
    tuple.__new__, Operand
)
_quantized: Callable[[tuple[Operand | None, Operand | None]], Quantized] = partial(
    tuple.__new__, Quantized
)


_SUMMED_DTYPES = (torch.bfloat16, torch.float16)
_SUMMED_MODES = ("tensor", "row", "vec128")
"""What there are kernels with column sums for: dtypes of the tensor, and what a scale covers."""

_STEPS_OF_ZEROS = (16, 32)
"""The numbers of rows that casts with scales of bytes pad to: the kernel of MXFP8 writes the scales
of blocks of 32 rows of which the tensor has one."""

Results: TypeAlias = "tuple[Quantized, tuple[int, ...], torch.Tensor | None]"
"""The result of a cast, the arguments of its native call that follow those of the tensor (the
fields of ``QuantizeArguments``, see csrc/include/fp8core/quantize.h), and its workspace."""


class Quantize:
    """A cast in one call of the native library: one spec, in the orientations that have it."""

    __slots__ = (
        "_columnwise",
        "_empty",
        "_index",
        "_mode",
        "_now",
        "_rowwise",
        "_workspace_floats",
        "dtype",
        "kernel",
        "native_cast",
    )

    def __init__(
        self,
        desc: QuantizeDesc,
        spec: OperandSpec,
        device: torch.device,
        native: Any,
    ) -> None:
        mode = scale_mode(spec)
        assert mode is not None
        self._mode: str = mode
        self.dtype = desc.dtype
        self.kernel = (
            "fp8core::directed_tile" if mode in ("row", "vec128") else "fp8core::uniform_tile"
        )
        self._rowwise = desc.rowwise is not None
        self._columnwise = desc.columnwise is not None
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._now = allocator_now(self._index)
        self._workspace_floats = 0
        if mode == "tensor" and not spec.delayed:
            self._workspace_floats = native.MAX_PARTIALS
        self.native_cast = _native_quantize(desc, spec, self._index, native)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        """Quantize ``x``.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        (rows, cols), slots = x.shape, slots_of(scale, amax_out, nonfinite_out)
        if self._mode != "tensor" or not (rows and cols and x.is_contiguous()):
            return self._quantize_any(x, scale, amax, slots)
        if x.dtype is not self.dtype:
            raise wrong_dtype("quantize", x.dtype, self.dtype)
        quantized, results, _workspace = self._tensor_results(rows, cols, slots, amax)
        self.native_cast((x.data_ptr(), rows, cols, cols, *results), raw_stream(self._index))
        return quantized

    def results(self, rows: int, cols: int, slots: Slots) -> Results:
        """Allocate the result of casting a tensor ``[rows, cols]`` that has elements.

        Returns the result, the arguments of the native cast that follow those of the tensor, and
        the workspace, which the caller holds until the cast is enqueued.
        """
        if self._mode == "tensor":
            return self._tensor_results(rows, cols, slots)
        return self._results_of_any(rows, cols, None, slots)

    def _tensor_results(
        self, rows: int, cols: int, slots: Slots, amax: torch.Tensor | None = None
    ) -> Results:
        """Return what :meth:`results` returns, of a cast with one scale for the tensor; ``amax`` is
        the workspace with a given amax."""
        empty = self._now()
        scale_inv = empty(_SINGLE, _SINGLE, _FLOAT32)  # both orientations share it
        scale_inv_address = scale_inv.data_ptr()
        row = column = None
        row_codes = column_codes = workspace_address = 0
        pitch = column_pitch(rows)
        if self._rowwise:
            codes = empty((rows, cols), (cols, 1), _UINT8)
            row_codes = codes.data_ptr()
            row = _operand((codes, scale_inv, None))
        if self._columnwise:
            codes = empty((cols, rows), (pitch, 1), _UINT8)
            column_codes = codes.data_ptr()
            column = _operand((codes, scale_inv, None))
        workspace = amax
        if amax is None and self._workspace_floats:
            workspace = empty((self._workspace_floats,), (1,), _FLOAT32)
        if workspace is not None:
            workspace_address = workspace.data_ptr()
        addresses: tuple[int, ...] = (
            row_codes,
            scale_inv_address,
            1,  # pitch of the scales
            column_codes,
            scale_inv_address,
            1,
            *slots,
            workspace_address,
            pitch,
        )
        if amax is not None:  # the workspace has amaxes
            addresses = (*addresses, 1)
        return _quantized((row, column)), addresses, workspace

    def _quantize_any(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax: torch.Tensor | None,
        slots: Slots,
    ) -> Quantized:
        """Quantize in any mode, from any strides; ``amax`` is the workspace with given amaxes."""
        if x.dtype is not self.dtype:
            raise wrong_dtype("quantize", x.dtype, self.dtype)
        rows, cols = x.shape
        if not (rows and cols):
            return self._quantize_empty(rows, cols, scale)
        x, stride = adjacent_columns(x)
        quantized, results, _workspace = self._results_of_any(rows, cols, amax, slots)
        addresses = (x.data_ptr(), rows, cols, stride, *results)
        self.native_cast(addresses, raw_stream(self._index))
        return quantized

    def _results_of_any(
        self, rows: int, cols: int, amax: torch.Tensor | None, slots: Slots
    ) -> Results:
        """Return what :meth:`results` returns, in any mode."""
        mode, empty, workspace = self._mode, self._now(), amax
        size = rows + cols if mode == "row" else self._workspace_floats
        if amax is None and size:
            workspace = empty((size,), (1,), _FLOAT32)
        shared = empty_scales(mode, rows, cols, empty) if mode == "tensor" else None
        operands: list[Operand | None] = []
        outputs: list[tuple[int, int, int]] = []  # codes, scale_inv and its pitch
        pitch_of_columns = column_pitch(rows)
        orientations = (
            (self._rowwise, (rows, cols), cols),
            (self._columnwise, (cols, rows), pitch_of_columns),
        )
        for is_present, shape, pitch_of_codes in orientations:
            if not is_present:
                operands.append(None)
                outputs.append((0, 0 if shared is None else shared[0].data_ptr(), 1))
                continue
            codes = empty_codes(mode, *shape, empty, pitch_of_codes)
            scale_inv, pitch = shared or empty_scales(mode, *shape, empty)
            operands.append(Operand(codes, scale_inv))
            outputs.append((codes.data_ptr(), scale_inv.data_ptr(), pitch))
        addresses: tuple[int, ...] = (
            *outputs[0],
            *outputs[1],
            *slots,
            0 if workspace is None else workspace.data_ptr(),
            pitch_of_columns,
        )
        if amax is not None:  # the workspace has amaxes
            addresses = (*addresses, 1)
        return Quantized(*operands), addresses, workspace

    def _quantize_empty(self, rows: int, cols: int, scale: torch.Tensor | None) -> Quantized:
        """Return operands without elements; their scales are 1, or the delayed one."""

        def operand(m: int, k: int) -> Operand:
            scale_inv, _ = empty_scales(self._mode, m, k, self._empty)
            scale_inv.fill_(1.0) if scale is None else scale_inv.copy_(1.0 / scale.reshape(1, 1))
            return Operand(self._empty((m, k), (max(k, 1), 1), _UINT8), scale_inv)

        return Quantized(
            operand(rows, cols) if self._rowwise else None,
            operand(cols, rows) if self._columnwise else None,
        )


class QuantizeAndSum:
    """A cast of a descriptor with ``sums``: a gradient read once, also for the bias.

    The sums have the bits of :class:`fp8core_backends.cuda.column_sums.ColumnSums`.
    """

    __slots__ = ("_cast", "_empty", "_index")

    def __init__(self, cast: Quantize, index: int) -> None:
        self._cast = cast
        self._index = index
        self._empty = allocator(index)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Quantized, torch.Tensor]:
        """Quantize ``x [rows, n]``, and return its column sums, float32 ``[n]``.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        (rows, cols), cast = x.shape, self._cast
        if x.dtype is not cast.dtype:
            raise wrong_dtype("quantize_and_sum", x.dtype, cast.dtype)
        if not (rows and cols):
            quantized = cast(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)
            return quantized, torch.zeros(cols, dtype=torch.float32, device=x.device)
        x, stride = adjacent_columns(x)
        # Freed memory may be handed out again at once: both workspaces are held over the launch.
        slots = slots_of(scale, amax_out, nonfinite_out)
        quantized, results, _workspace = cast.results(rows, cols, slots)
        sums = self._empty((cols,), (1,), torch.float32)
        size = cast.native_cast.tile_sums_floats(rows, cols)
        tile_sums = self._empty((size,), (1,), torch.float32)
        addresses = (sums.data_ptr(), tile_sums.data_ptr())
        arguments = (*addresses, x.data_ptr(), rows, cols, stride, *results)
        cast.native_cast.and_sum(arguments, raw_stream(self._index))
        return quantized, sums


def _native_quantize(desc: QuantizeDesc, spec: OperandSpec, index: int, native: Any) -> Any:
    """Return the native cast of ``spec``: called with its arguments and a stream."""
    largest = _FLOAT32_MAX if spec.block[1] == 0 else torch.finfo(desc.dtype).max
    return native.Quantize(
        native.Granularity.__members__["delayed" if spec.delayed else scale_mode(spec)],
        native.Format.__members__[spec.format],
        native.InputType.__members__[DTYPES[desc.dtype]],
        native.ScaleRule(spec.target, spec.amax_epsilon, largest, spec.power_of_two),
        index,
    )


def cast_problem(desc: QuantizeDesc) -> str | None:
    """Say why no kernel casts as ``desc`` says, but for its sums and chunks, or None."""
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if not specs:
        return "neither orientation is asked for"
    are_floats = {spec.scale_format == "float32" for spec in specs}
    of_rows = None if desc.rowwise is None else desc.rowwise.transform
    steps = _STEPS_OF_ZEROS if False in are_floats else (GROUP_STEP,)
    problem = first_problem(
        (
            len({spec.delayed for spec in specs}) > 1,
            "one orientation is delayed, the other is not",
        ),
        (len(are_floats) > 1, "one orientation has scales of float32, the other of bytes"),
        (of_rows is not None, f"no kernels for the transform {of_rows} along rows"),
        (desc.dtype not in DTYPES, f"no low precision from {desc.dtype}"),
        (desc.offsets_on_device and not desc.grouped, "offsets without groups"),
        (desc.padded and desc.offsets_on_device, "groups of device sizes lie apart already"),
        (
            desc.padded and not desc.grouped and True in are_floats,
            "no zeros behind a tensor with float32 scales: a product's caller adds them",
        ),
        (
            desc.padded and desc.padded not in steps,
            f"no zeros up to a multiple of {desc.padded} rows",
        ),
        (
            desc.offsets_on_device and are_floats == {False},
            "scales of bytes take the sizes of groups as a list alone",
        ),
    )
    return problem or next(filter(None, map(spec_problem, specs)), None)


def _problem(desc: QuantizeDesc) -> str | None:
    """Say why no kernel casts as ``desc`` says, or None."""
    problem = cast_problem(desc)
    if desc.split:
        return "the halves of a tensor are two casts, but where it is computed as it is cast"
    if problem is not None or not (desc.sums or desc.chunked):
        return problem
    spec = desc.rowwise or desc.columnwise
    assert spec is not None
    mode, is_both = scale_mode(spec), desc.rowwise is not None and desc.columnwise is not None
    has_sums = desc.dtype in _SUMMED_DTYPES and mode in _SUMMED_MODES
    return first_problem(
        (desc.grouped, "no sums and no chunks of groups"),
        (is_both and desc.rowwise != desc.columnwise, "orientations that differ are two casts"),
        (desc.sums and not has_sums, f"no column sums with a cast of {desc.dtype} by {spec}"),
        (desc.chunked and not is_both, "a cast in chunks is of both orientations"),
        (desc.chunked and mode not in CHUNKED_MODES, f"no chunks by {spec}"),
    )


@runs(QuantizeDesc, refuses=_problem, is_recorded=True)
def bind_quantize(desc: QuantizeDesc, device: torch.device, native: Any) -> Callable[..., Any]:
    """Return the callable of ``desc``: one native call, or one an orientation if specs differ."""

    def bind(desc: QuantizeDesc) -> Callable[..., Any]:
        spec = desc.rowwise or desc.columnwise
        assert spec is not None
        if spec.scale_format != "float32":
            return ByteScaled(desc, device, native)
        if casts_groups(desc):
            index = index_of(device)
            cast = DeviceQuantize(desc, spec, device, _native_quantize(desc, spec, index, native))
            return PaddedGroups(desc, cast, index, native) if desc.padded else cast
        return _variant(Quantize(desc, spec, device, native), desc, device, native)

    return composed(desc, bind)


def _variant(
    cast: Quantize, desc: QuantizeDesc, device: torch.device, native: Any
) -> Callable[..., Any]:
    """Return ``cast`` with the sums and the chunks that ``desc`` asks for."""
    whole = QuantizeAndSum(cast, index_of(device)) if desc.sums else cast
    if not desc.chunked:
        return whole
    return QuantizeChunked(desc, device, native, cast.native_cast, whole)
