"""Groups whose sizes only the device knows: one cast and one product for all of them; and the same
cast of groups whose sizes the host knows.

Nothing here reads an offset, which would wait for the device: tensors whose sizes depend on offsets
are allocated as large as they can become, and the kernels read the offsets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from fp8core.backend_api import (
    GROUP_STEP,
    GroupedGemmDesc,
    Operand,
    OperandError,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core_backends.cuda.layout import (
    ALIGNMENT,
    BLOCKS,
    DTYPES,
    adjacent_columns,
    empty_scales,
    group_pitch,
    round_up,
    scale_mode,
    scale_shape,
    slots_of,
    wrong_dtype,
)
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.stream import index_of, raw_stream

_GroupedOperand: TypeAlias = "tuple[list[int], int, list[int], int, int, int]"
"""The fields of the native GroupedOperand: addresses of codes, bytes between rows; addresses of
scales, their strides by row and by k, and how many there are along k."""


class DeviceQuantize:
    """A cast of all groups in one native call; one spec, in the orientations that have it."""

    __slots__ = (
        "_columnwise",
        "_device",
        "_dtype",
        "_empty",
        "_is_delayed",
        "_is_padded",
        "_mode",
        "_native_cast",
        "_rowwise",
        "kernel",
    )

    def __init__(
        self, desc: QuantizeDesc, spec: OperandSpec, device: torch.device, native_cast: Any
    ) -> None:
        mode = scale_mode(spec)
        assert mode is not None
        self._mode: str = mode
        self._dtype = desc.dtype
        self._is_delayed = spec.delayed
        self._is_padded = desc.padded > 0
        self._rowwise = desc.rowwise is not None
        self._columnwise = desc.columnwise is not None
        self._device = torch.device("cuda", index_of(device))
        self._empty = allocator(self._device.index)
        self._native_cast = native_cast
        self.kernel = (
            "fp8core::directed_tile" if mode in ("row", "vec128") else "fp8core::uniform_tile"
        )

    def __call__(
        self,
        x: torch.Tensor,
        group_offsets: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        """Quantize; see the backend API. ``amax`` is the workspace with given amaxes."""
        (rows, cols), device = x.shape, self._device
        if x.dtype is not self._dtype:
            raise wrong_dtype("quantize", x.dtype, self._dtype)
        offsets, groups = checked_offsets(group_offsets, device)
        x, stride = adjacent_columns(x)
        operands: list[Operand | None] = [None, None]
        outputs = [(0, 0, 1), (0, 0, 1)]  # codes, scale_inv and its pitch
        length = GROUP_STEP * (rows // GROUP_STEP + groups)
        pitch = group_pitch(length) if self._is_padded else length
        scales = self._scales(rows, cols, groups)
        if not cols:
            for scale_inv, _ in scales:
                scale_inv.fill_(1.0) if scale is None else scale_inv.copy_(
                    (1.0 / scale).reshape(scale_inv.shape)
                )
        if self._rowwise:
            # Room behind the last group: products take whole steps of rows.
            codes = self._empty((rows + ALIGNMENT, cols), (cols, 1), torch.uint8)
            outputs[0] = (codes.data_ptr(), scales[0][0].data_ptr(), scales[0][1])
            operands[0] = Operand(codes[:rows], scales[0][0])
        if self._columnwise:
            codes = self._empty((cols, pitch), (pitch, 1), torch.uint8)
            outputs[1] = (codes.data_ptr(), scales[1][0].data_ptr(), scales[1][1])
            operands[1] = Operand(codes[:, :length], scales[1][0])
        if not cols:
            return Quantized(*operands)  # without an element there is no address to write to
        if self._mode == "tensor":  # one scale a group for both orientations
            outputs[0] = (outputs[0][0], scales[0][0].data_ptr(), 1)
        workspace = self._workspace(rows, cols, groups) if amax is None else amax
        addresses = (
            x.data_ptr(),
            rows,
            cols,
            stride,
            *outputs[0],
            *outputs[1],
            *slots_of(scale, amax_out, nonfinite_out),
            0 if workspace is None else workspace.data_ptr(),
            pitch,  # bytes between the rows of the columnwise codes
            0 if amax is None else 1,  # whether the workspace holds amaxes
            offsets.data_ptr(),
            groups,
            0 if scale is None else scale.stride(0),
            0 if amax_out is None else amax_out.stride(0),
        )
        self._native_cast(addresses, raw_stream(device.index))
        return Quantized(*operands)

    def _scales(self, rows: int, cols: int, groups: int) -> list[tuple[torch.Tensor, int]]:
        """Allocate the scales of the rowwise and of the columnwise operand; each with its pitch."""
        mode, empty = self._mode, self._empty
        # Blocks of 128 rows are counted group by group, and there are at most so many.
        blocks = 128 * (rows // 128 + groups)
        if mode == "tensor":
            scale_inv = empty((groups,), (1,), torch.float32)
            return [(scale_inv[:, None], 1), (scale_inv[None], 1)]
        if mode == "row":
            by_group = empty((groups, cols), (cols, 1), torch.float32)
            return [empty_scales(mode, rows, cols, empty), (by_group.t(), cols)]
        row_size = rows if mode == "vec128" else blocks
        return [
            empty_scales(mode, row_size, cols, empty),
            empty_scales(mode, cols, blocks, empty),
        ]

    def _workspace(self, rows: int, cols: int, groups: int) -> torch.Tensor | None:
        size = rows + groups * cols if self._mode == "row" else groups
        if self._mode in BLOCKS or self._is_delayed:
            return None
        return self._empty((size,), (1,), torch.float32)


class PaddedGroups:
    """A cast of groups whose sizes the host knows, which pads them: by ``cast``, that of sizes on
    the device. A launch stores the offsets there."""

    __slots__ = ("_blocks", "_cast", "_empty", "_index", "_store", "kernel")

    def __init__(self, desc: QuantizeDesc, cast: DeviceQuantize, index: int, native: Any) -> None:
        row, column = desc.rowwise, desc.columnwise
        # Along the groups, rows under one scale of each operand.
        self._blocks = (
            0 if row is None else row.block[0],
            0 if column is None else column.block[1],
        )
        self._cast = cast
        self._index = index
        self._empty = allocator(self._index)
        self._store = native.store_group_offsets
        self.kernel = cast.kernel

    def __call__(
        self, x: torch.Tensor, group_offsets: torch.Tensor, **slots: torch.Tensor | None
    ) -> Quantized:
        """Quantize; see the backend API."""
        bounds: list[int] = group_offsets.tolist()
        offsets = self._empty((len(bounds),), (1,), torch.int64)
        self._store((offsets.data_ptr(), bounds), self._index, raw_stream(self._index))
        row, column = self._cast(x, offsets, **slots)
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
        if row is not None:
            row = _cut_scales(row, 0, sizes, self._blocks[0])
        if column is not None:
            codes = column.data[:, : sum(round_up(size, GROUP_STEP) for size in sizes)]
            column = _cut_scales(column._replace(data=codes), 1, sizes, self._blocks[1])
        return Quantized(row, column)


def _cut_scales(operand: Operand, dim: int, sizes: Sequence[int], block: int) -> Operand:
    """Return ``operand`` without the scales beyond those of groups of ``sizes`` along ``dim``, of
    which one covers ``block`` rows."""
    if block <= 1:
        return operand
    assert operand.scale_inv is not None
    count = sum(-(-size // block) for size in sizes)
    return operand._replace(scale_inv=operand.scale_inv.narrow(dim, 0, count))


class DeviceGroupedGemm:
    """The products of many groups in one launch, of ``b`` in low precision; see GroupedGemmDesc."""

    __slots__ = (
        "_adds_after",
        "_desc",
        "_device",
        "_dtype",
        "_modes",
        "_native_gemm",
        "_types",
        "kernel",
    )

    kernel: str

    def __init__(
        self,
        desc: GroupedGemmDesc,
        device: torch.device,
        native: Any,
        a_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """``a_dtype``: of an ``a`` in high precision, by which there are rows of groups alone."""
        assert desc.b is not None
        self._desc = desc
        self._device = torch.device("cuda", index_of(device))
        # The kernel adds to float32 alone; to another dtype its product is added by torch.
        self._adds_after = desc.accumulate and desc.out_dtype != torch.float32
        self._dtype = torch.float32 if self._adds_after else desc.out_dtype
        types, modes = native.ElementType.__members__, native.ScaleMode.__members__
        self._types = types
        names = ["none" if desc.a is None else scale_mode(desc.a), scale_mode(desc.b)]
        self._modes = names
        self._native_gemm = native.GroupedGemm(
            types[DTYPES[a_dtype] if desc.a is None else desc.a.format],
            types[desc.b.format],
            *(modes[name] for name in names),
            types[DTYPES[self._dtype]],
            desc.contract_groups,
            desc.accumulate and not self._adds_after,
            desc.fast_accumulation,
            self._device.index,
        )
        kernel = "multiply_few_rows_of_groups" if desc.a is None else "sm90::grouped_product"
        self.kernel = f"fp8core::{kernel}, {names[0]} x {names[1]} scales"

    def __call__(
        self,
        a: Operand,
        b: Operand | Sequence[Operand],
        group_offsets: torch.Tensor,
        *,
        bias: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Multiply; see the backend API."""
        desc = self._desc
        offsets, groups = checked_offsets(group_offsets, self._device)
        seconds = [b] if isinstance(b, Operand) else list(b)
        (m, k), n = a.data.shape, seconds[0].data.shape[0]
        outputs = None if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
        self._check((m, n, k), seconds, groups, bias, outputs)
        if desc.a is None:
            self._check_blocks(seconds, (n, k))
        else:
            self._check_scales([a, *seconds] if desc.contract_groups else [a], groups)
        d = self._outputs((m, n), groups if desc.contract_groups else 1, outputs)
        if m and n:
            copies: list[torch.Tensor] = []  # held until the launch
            biases, bias_type = self._biases(bias, copies)
            arguments = (
                m,
                n,
                k,
                *_fields([a], copies),
                *_fields(seconds, copies),
                biases,
                bias_type,
                [output.data_ptr() for output in d],
                offsets.data_ptr(),
                groups,
            )
            self._native_gemm(arguments, raw_stream(self._device.index))
        if outputs is None:
            d = [product.to(desc.out_dtype) for product in d] if self._adds_after else d
            return d if desc.contract_groups else d[0]
        for target, written in zip(outputs, d, strict=True):
            if target is written:
                increment_version(target)  # torch does not see the kernel's write
            else:
                target.copy_(written.add_(target) if self._adds_after else written)
        return out  # type: ignore[return-value]  # it is given

    def _check(
        self,
        sizes: tuple[int, int, int],
        seconds: list[Operand],
        groups: int,
        bias: Sequence[torch.Tensor] | None,
        out: list[torch.Tensor] | None,
    ) -> None:
        """Refuse shapes with which the product would read or write beyond a tensor's end."""
        m, n, k = sizes
        count, outputs = (1, groups) if self._desc.contract_groups else (groups, 1)
        is_right = len(seconds) == count and n % ALIGNMENT == 0
        is_right &= all(second.data.shape == (n, k) for second in seconds)
        if bias is not None:
            is_right &= len(bias) == groups and all(vector.shape == (n,) for vector in bias)
        if out is not None:
            dtype = self._desc.out_dtype
            is_right &= len(out) == outputs
            is_right &= all(output.shape == (m, n) and output.dtype == dtype for output in out)
        if not is_right:
            shapes = ", ".join(str(list(second.data.shape)) for second in seconds[:4])
            raise OperandError(
                f"{self._desc}: a {[m, k]}, {len(seconds)} b {shapes}, {groups} groups, "
                f"{None if bias is None else len(bias)} biases; expected {count} b [n, {k}] with n "
                f"a multiple of {ALIGNMENT}, bias [n], out [m, n] of {self._desc.out_dtype}."
            )

    def _check_blocks(self, seconds: list[Operand], size: tuple[int, int]) -> None:
        """Refuse operands without the scales that the kernel for few rows reads."""
        mode, shapes = self._modes[1], {tuple(second.scale_inv.shape) for second in seconds}  # type: ignore[union-attr]  # quantized
        expected = scale_shape(mode, size[0], -(-size[1] // 128))
        if shapes != {expected}:
            raise OperandError(
                f"{self._desc}: operands with scales {sorted(shapes)}; expected {expected} each."
            )

    def _check_scales(self, operands: Sequence[Operand], groups: int) -> None:
        """Refuse an operand of groups that has not a scale for each of them."""
        along = 1 if self._desc.contract_groups else 0
        for operand, spec in zip(operands, (self._desc.a, self._desc.b), strict=False):
            assert spec is not None
            assert operand.scale_inv is not None
            is_by_group = spec.block[along] == 0
            if is_by_group and operand.scale_inv.shape[along] != groups:
                shape = list(operand.scale_inv.shape)
                raise OperandError(
                    f"{self._desc}: an operand has scales {shape}; expected one for each of "
                    f"{groups} groups along dimension {along}."
                )

    def _outputs(
        self, shape: tuple[int, int], count: int, outputs: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return the tensors that the kernel writes: ``outputs``, or copies where it cannot."""
        dtype, device = self._dtype, self._device
        if outputs is None or self._adds_after:
            new = torch.zeros if self._desc.accumulate else torch.empty
            return [new(shape, dtype=dtype, device=device) for _ in range(count)]
        return [
            output
            if output.is_contiguous() and output.data_ptr() % ALIGNMENT == 0
            else output.clone(memory_format=torch.contiguous_format)
            for output in outputs
        ]

    def _biases(
        self, bias: Sequence[torch.Tensor] | None, copies: list[torch.Tensor]
    ) -> tuple[list[int], Any]:
        """Return the addresses of biases of one dtype, and that dtype; copies go to ``copies``."""
        types = self._types
        if bias is None:
            return [], types["float32"]
        dtypes = {vector.dtype for vector in bias}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        if dtype not in DTYPES:
            dtype = torch.float32
        readable = [vector.to(dtype).contiguous() for vector in bias]
        copies.extend(readable)
        return [vector.data_ptr() for vector in readable], types[DTYPES[dtype]]


def checked_offsets(group_offsets: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return offsets as the kernels read them, and the number of groups."""
    if group_offsets.device != device or group_offsets.dim() != 1 or not len(group_offsets) > 1:
        raise OperandError(
            f"group_offsets {list(group_offsets.shape)} on {group_offsets.device}; expected int64 "
            f"[groups + 1] on {device}."
        )
    return group_offsets.to(torch.int64).contiguous(), len(group_offsets) - 1


def _fields(operands: Sequence[Operand], copies: list[torch.Tensor]) -> _GroupedOperand:
    """Return the native fields of operands of one shape; those that the kernel cannot read where
    they are are copied, and the copies added to ``copies``."""
    data = [operand.data for operand in operands]
    scales = [operand.scale_inv for operand in operands if operand.scale_inv is not None]
    (rows, k), size = data[0].shape, data[0].itemsize
    pitch = data[0].stride(0) if rows > 1 else round_up(k, ALIGNMENT)
    if pitch * size % ALIGNMENT or not all(_is_readable(part, pitch) for part in data):
        pitch = round_up(max(k, 1), ALIGNMENT)
        data = [part.new_empty((rows, pitch))[:, :k].copy_(part) for part in data]
        copies.extend(data)
    codes = [part.data_ptr() for part in data]
    if not scales:  # of an operand in high precision
        return codes, pitch * size, [], 0, 0, 0
    strides = scales[0].stride()
    if any(part.stride() != strides for part in scales):
        scales = [part.contiguous() for part in scales]
        copies.extend(scales)
        strides = scales[0].stride()
    scale_inv = [part.data_ptr() for part in scales]
    return codes, pitch * size, scale_inv, strides[0], strides[1], scales[0].shape[1]


def _is_readable(data: torch.Tensor, pitch: int) -> bool:
    rows, k = data.shape
    is_spaced = rows <= 1 or data.stride(0) == pitch
    return is_spaced and (k <= 1 or data.stride(1) == 1) and data.data_ptr() % ALIGNMENT == 0
