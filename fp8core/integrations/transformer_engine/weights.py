"""Quantized weights whose master copies are spread over ranks: ``transformer_engine.pytorch.tensor.
utils``, which distributed optimizers such as Megatron's call.

A rank holds the master copy of a range of each flattened weight. It writes the codes of that range
into its full copy of the weight, by scales that all ranks agree on; the caller gathers the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import OperandSpec
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.collectives import of_group
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.operators import refuse_part
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import entries, is_square, make_operands, padded_with, turn


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Have the rowwise codes of ``tensor`` lie in ``new_raw_data``, a contiguous uint8 tensor of as
    many elements on its device, such as a part of a buffer that ranks gather; the codes stay.

    Raises:
        OperandError: ``tensor`` is not quantized, or the buffer does not fit.
        UnsupportedError: ``tensor`` holds no rowwise codes.
    """
    codes = _rowwise_codes("replace_raw_data", tensor)
    if (
        not isinstance(new_raw_data, torch.Tensor)
        or (new_raw_data.dtype, new_raw_data.device) != (codes.dtype, codes.device)
        or new_raw_data.numel() != codes.numel()
        or not new_raw_data.is_contiguous()
    ):
        raise OperandError(
            f"replace_raw_data: new_raw_data is {_described(new_raw_data)}, expected "
            f"{codes.numel()} contiguous elements of {codes.dtype} on {codes.device}."
        )
    with torch.no_grad():
        buffer = new_raw_data.detach().view(codes.shape)
        buffer.copy_(codes)
    tensor._rowwise_data, tensor._padded = buffer, None
    torch.autograd.graph.increment_version(tensor)


def quantize_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write the codes of each rank's part of the weights, by the scales of the whole weights.

    Args:
        model_weights: the full quantized weights, the same on all ranks of ``group``.
        master_weights: this rank's part of each, any shape, rounded to the weight's dtype first;
            None where others have all of it.
        start_offsets: the index of the part's first element in the flattened weight.
        group: over which scales agree; None for the default group.
        fsdp_shard_model_weights: uint8 tensors that get the rowwise codes of the parts instead of
            the full weights, which get the scales.
        manual_post_all_gather_processing: the caller calls :func:`post_all_gather_processing` when
            the codes are gathered.

    With the codes of all ranks gathered, each weight has the bits of one quantized from the whole
    master copy, in every recipe. Formats that round the columns by themselves (MXFP8, rowwise)
    write the columnwise codes of the part as well, which are to be gathered too.

    Raises:
        OperandError: an argument does not fit, named with its number; nothing is written.
        UnsupportedError: a weight in FP4 that holds columns, or that is cut between the two codes
            of a byte; one that stores its columns beside its rows, without
            ``manual_post_all_gather_processing``; or a view whose scale covers more than itself.
    """
    lists = {
        "master_weights": master_weights,
        "start_offsets": start_offsets,
        "fsdp_shard_model_weights": fsdp_shard_model_weights or [None] * len(model_weights),
    }
    for name, values in lists.items():
        if len(values) != len(model_weights):
            raise OperandError(
                f"quantize_master_weights: {name} has {len(values)} entries, model_weights "
                f"{len(model_weights)}."
            )
    rows = zip(model_weights, *lists.values(), strict=True)
    parts = [
        _Part.of(number, *row, is_manual=manual_post_all_gather_processing)
        for number, row in enumerate(rows)
    ]
    casts = [(part, way) for part in parts for way in part.ways]
    if not casts:
        return
    with torch.no_grad():
        amaxes = [part.amaxes(way) for part, way in casts]
        flat = torch.cat([amax.flatten() for amax in amaxes])
        maxima = of_group(group).max(flat, "amaxes of master weights").wait()
        pieces = torch.split(maxima, [amax.numel() for amax in amaxes])
        for (part, way), amax, maximum in zip(casts, amaxes, pieces, strict=True):
            part.write(way, maximum.view(amax.shape))
    for part in parts:
        part.weight.clear_high_precision_init_val()  # master copies were made from it


def cast_master_weights_to_fp8(*args: Any, **kwargs: Any) -> None:
    """As :func:`quantize_master_weights`, whose earlier name this is."""
    quantize_master_weights(*args, **kwargs)


def post_all_gather_processing(model_weights: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Make the columnwise codes of weights from their rowwise ones, which were gathered.

    Plain tensors, weights whose columns are views of the rows, and formats that round the columns
    by themselves stay as they are.
    """
    weights = [model_weights] if isinstance(model_weights, torch.Tensor) else model_weights
    for weight in weights:
        if not isinstance(weight, QuantizedTensor):
            continue
        rowwise, columnwise = weight.stored
        if rowwise is not None and columnwise is not None and _casts_once(weight):
            new = turn(rowwise)
            if weight._casting.columns_of is not None:
                matrix = weight.decoded().view(rowwise.data.shape[0], -1)
                new = make_operands(matrix, TensorPlan(None, weight.plan.columnwise)).columnwise
            for old, part in zip(columnwise, new, strict=True):
                if old is not None and part is not None:
                    old.copy_(part)
        torch.autograd.graph.increment_version(weight)


class _Part(NamedTuple):
    """A rank's range ``start:end`` of the elements of a flattened weight, None without any."""

    weight: QuantizedTensor
    master: torch.Tensor | None
    start: int
    end: int
    target: torch.Tensor | None

    @classmethod
    def of(
        cls,
        number: int,
        weight: Any,
        master: Any,
        start: Any,
        target: torch.Tensor | None,
        *,
        is_manual: bool,
    ) -> _Part:
        """Return the part with this ``number`` in the caller's lists.

        Raises:
            OperandError, UnsupportedError: see :func:`quantize_master_weights`.
        """
        owner = f"quantize_master_weights: model_weights[{number}]"
        codes = _rowwise_codes(owner, weight)
        refuse_part(weight)
        per_byte = codes_per_byte(weight.plan.rowwise)
        if per_byte > 1 and weight.plan.columnwise is not None:
            raise UnsupportedError(
                f"{owner} is in {weight.plan.rowwise.format} and holds columns, whose codes share "
                f"bytes with those of other ranks. Make it under quantized_model_init inside "
                f"torch.no_grad(), which holds rows alone, or keep it in high precision."
            )
        if weight.stored[1] is not None and _casts_once(weight) and not is_manual:
            raise UnsupportedError(
                f"{owner} stores its columns beside its rows: pass "
                f"manual_post_all_gather_processing=True, and call post_all_gather_processing when "
                f"the codes are gathered."
            )
        if master is None:
            return cls(weight, None, 0, 0, target)
        if not isinstance(master, torch.Tensor) or not master.is_floating_point():
            raise OperandError(f"{owner}: its master is {_described(master)}, expected floats.")
        if type(start) is not int or not 0 <= start <= start + master.numel() <= weight.numel():
            raise OperandError(
                f"{owner} has {weight.numel()} elements; master_weights[{number}] has "
                f"{master.numel()}, from start_offsets[{number}]={start!r}."
            )
        end = start + master.numel()
        if start % per_byte or (end % per_byte and end < weight.numel()):
            raise UnsupportedError(
                f"{owner} is cut at {start} and {end}, between two codes of a byte. Cut it at even "
                f"elements."
            )
        if master.device != codes.device:
            raise OperandError(f"{owner} is on {codes.device}, its master on {master.device}.")
        size = -(-master.numel() // per_byte)
        if target is not None and (
            not isinstance(target, torch.Tensor)
            or (target.dtype, target.device, target.numel()) != (codes.dtype, codes.device, size)
            or not target.is_contiguous()
        ):
            raise OperandError(
                f"{owner}: fsdp_shard_model_weights[{number}] is {_described(target)}, expected "
                f"{size} contiguous elements of {codes.dtype} on {codes.device}."
            )
        return cls(weight, master.detach().to(weight.dtype).flatten(), start, end, target)

    @property
    def ways(self) -> tuple[str, ...]:
        """The orientations that are cast: not the columns that are made from the rows."""
        return ("rowwise",) if _casts_once(self.weight) else ("rowwise", "columnwise")

    def amaxes(self, way: str) -> torch.Tensor:
        """Return the largest magnitude in each block of an operand, 0 where this rank has none."""
        size = self._size(way)
        matrix = self._matrix(way, self.weight.new_zeros(size))
        magnitudes = matrix.abs().nan_to_num(nan=0.0, posinf=torch.inf).float()
        spec = self._spec(way)
        block = [step or size for step, size in zip(spec.block, matrix.shape, strict=True)]
        counts = [entries(size, step) for size, step in zip(matrix.shape, block, strict=True)]
        added = [n * step - size for n, step, size in zip(counts, block, matrix.shape, strict=True)]
        whole = padded_with(magnitudes, (added[0], added[1]))
        return whole.view(counts[0], block[0], counts[1], block[1]).amax((1, 3))

    def write(self, way: str, amaxes: torch.Tensor) -> None:
        """Write the operand ``way``: all scales, and the codes of the part.

        Outside of the part each element is the amax of its block in all ranks, from which each
        block gets the scale that it has in the whole weight.
        """
        rows, columns = self._size(way)
        spec = self._spec(way)
        block = [step or size for step, size in zip(spec.block, (rows, columns), strict=True)]
        spread = amaxes.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        matrix = self._matrix(way, spread[:rows, :columns].to(self.weight.dtype))
        operand = make_operands(matrix, TensorPlan(spec, None)).rowwise
        stored = getattr(self.weight.operands, way)
        for scales, new in zip(stored[1:], operand[1:], strict=True):
            if scales is not None:
                scales.copy_(new)
        torch.autograd.graph.increment_version(self.weight)
        if self.master is None:
            return
        if way == "columnwise":
            rows_of_part = self._is_of_part().t()
            stored.data.copy_(torch.where(rows_of_part, operand.data, stored.data))
            return
        per_byte = codes_per_byte(spec)
        first, last = self.start // per_byte, -(-self.end // per_byte)
        target = stored.data.view(-1)[first:last] if self.target is None else self.target
        target.view(-1).copy_(operand.data.reshape(-1)[first:last])

    def _size(self, way: str) -> tuple[int, int]:
        columns = self.weight.shape[-1]
        rows = self.weight.numel() // max(columns, 1)
        return (rows, columns) if way == "rowwise" else (columns, rows)

    def _spec(self, way: str) -> OperandSpec:
        spec: OperandSpec = getattr(self.weight.plan, way)
        return spec

    def _is_of_part(self) -> torch.Tensor:
        """Return which elements of the weight this rank has."""
        rows, columns = self._size("rowwise")
        at = torch.arange(rows * columns, device=self.weight.device).view(rows, columns)
        return (at >= self.start) & (at < self.end)

    def _matrix(self, way: str, outside: torch.Tensor) -> torch.Tensor:
        """Return the operand's matrix of the part, and of that of ``outside`` beside it."""
        matrix = outside if way == "rowwise" else outside.t()
        flat = matrix.reshape(-1).clone()
        if self.master is not None:
            flat[self.start : self.end] = self.master
        whole = flat.view(matrix.shape)
        return whole if way == "rowwise" else whole.t().contiguous()


def _casts_once(weight: QuantizedTensor) -> bool:
    """Whether the columns of ``weight``, if it has any, follow from the codes of its rows."""
    row, column = weight.plan
    is_turned = row == column and column is not None and is_square(column)
    return column is None or weight._casting.columns_of is not None or is_turned


def _rowwise_codes(owner: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, QuantizedTensor):
        raise OperandError(f"{owner}: {_described(tensor)} is no quantized tensor.")
    if tensor._rowwise_data is None:
        raise UnsupportedError(f"{owner}: {tensor} holds columns alone; rows are what is gathered.")
    return tensor._rowwise_data


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return f"{value!r}"
