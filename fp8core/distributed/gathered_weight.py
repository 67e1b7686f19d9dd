"""A weight whose quantized rows FSDP2 gathers, in one orientation or in both, and the cast of a
rank's rows as part of the whole."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fp8core.backend_api import (
    AmaxDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    has_amax,
)
from fp8core.collectives import Communicator, of_group
from fp8core.dispatch import table
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import ShardedWeight, as_part_of
from fp8core.torch_ops.nonfinite import counter_of_writes


class RowShard(NamedTuple):
    """The rows of rank ``rank`` of ``num_ranks``: ``each`` of ``total`` rows, fewer at the end."""

    total: int
    each: int
    rank: int
    num_ranks: int

    @staticmethod
    def of(total: int, rank: int, num_ranks: int) -> RowShard:
        """Return the rows that ``torch.chunk`` gives to ``rank``."""
        return RowShard(total, -(-total // num_ranks), rank, num_ranks)

    @property
    def bounds(self) -> list[int]:
        """The first row of each rank, then ``total``."""
        return [min(rank * self.each, self.total) for rank in range(self.num_ranks + 1)]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many rows."""
        return self.each * self.num_ranks == self.total


class RowPart(NamedTuple):
    """The share of a rank in an operand: ``codes [rows, k]`` by rows of the matrix, also of a
    columnwise operand; and ``scales``, by rows too, those of the blocks that begin in its rows.
    Scales that cover all rows are the same on all ranks."""

    codes: torch.Tensor
    scales: torch.Tensor


class RowCast:
    """Casts a rank's rows of a matrix ``[total, columns]`` of ``dtype`` to one orientation.

    ``spec`` is that of an operand with scales of one level and codes of a byte.
    """

    def __init__(
        self, spec: OperandSpec, dtype: torch.dtype, columns: int, shard: RowShard, *, turns: bool
    ) -> None:
        """``turns``: the operand is columnwise, with the matrix's rows along its k."""
        self._desc = QuantizeDesc(dtype, None, spec) if turns else QuantizeDesc(dtype, spec, None)
        self._turns = turns
        self._columns = columns
        self._shard = shard
        self._block, self._width = spec.block[::-1] if turns else spec.block
        # A scale a row of the matrix depends on that row alone.
        self._reduces = has_amax(self._desc) and self._block != 1

    @property
    def covers_all_rows(self) -> bool:
        """Whether each scale covers all rows of the matrix."""
        return self._block == 0

    @cached_property
    def cut_blocks(self) -> list[int]:
        """The numbers of the blocks of rows that a boundary between ranks cuts, ascending."""
        if self._block < 2:
            return []
        inner = [bound for bound in self._shard.bounds[1:-1] if bound < self._shard.total]
        return sorted({bound // self._block for bound in inner if bound % self._block})

    @cached_property
    def scales_begin(self) -> list[int]:
        """By rank, the number of the first block that begins in its rows; then of all blocks."""
        return [-(-bound // self._block) for bound in self._shard.bounds]

    @property
    def max_scale_rows(self) -> int:
        """The most rows of scales that any rank holds, of scales that do not cover all rows."""
        return max(end - start for start, end in pairwise(self.scales_begin))

    @property
    def num_amaxes(self) -> int:
        """How many amaxes are reduced over the ranks."""
        if self._reduces:
            spec = self._desc.columnwise if self._turns else self._desc.rowwise
            assert spec is not None
            return self._columns if spec.block != (0, 0) else 1
        return len(self.cut_blocks) * self._num_widths

    @property
    def _num_widths(self) -> int:
        return -(-self._columns // self._width) if self._width else 1

    def amaxes(self, value: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[num_amaxes]`` of the rank's rows, ``value [rows, columns]``."""
        zeros = torch.zeros(self.num_amaxes, dtype=torch.float32, device=value.device)
        if not value.numel() or not self.num_amaxes:
            return zeros
        if self._reduces:
            amaxes: torch.Tensor = table.resolve(AmaxDesc(self._desc), value.device).run(value)
            return amaxes
        first = self._shard.bounds[self._shard.rank]
        of_blocks = zeros.view(len(self.cut_blocks), -1)
        for at, number in enumerate(self.cut_blocks):
            start, end = number * self._block - first, (number + 1) * self._block - first
            rows = value[max(start, 0) : max(end, 0)]
            if rows.numel():
                of_blocks[at] = self._largest(rows)
        return zeros

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in each group of columns, NaN ignored."""
        magnitudes = torch.where(rows.isnan(), 0.0, rows.abs()).amax(0).float()
        missing = self._num_widths * self._width - self._columns
        return torch.nn.functional.pad(magnitudes, (0, missing)).view(self._num_widths, -1).amax(1)

    def __call__(self, value: torch.Tensor, reduced: torch.Tensor) -> RowPart:
        """Cast the rank's rows; ``reduced`` is the maximum of :meth:`amaxes` over the ranks."""
        first, last = self._shard.bounds[self._shard.rank :][:2]
        start, end = first, last
        if self._block > 1 and value.numel():
            start = first // self._block * self._block
            end = min(-(-last // self._block) * self._block, self._shard.total)
        x = value
        if (start, end) != (first, last):
            x = self._extended(value, first - start, end - last, reduced)
        codes, scales = self._cast(x, reduced)
        if self._turns:
            codes, scales = codes.t(), scales.t()
        codes = codes[first - start :][: last - first]
        return RowPart(codes.contiguous(), scales[int(start < first) :].contiguous())

    def _cast(self, x: torch.Tensor, reduced: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = counter_of_writes(x.device)
        keywords = {} if count is None else {"nonfinite_out": count}
        desc = dataclasses.replace(self._desc, counted=count is not None)
        if self._reduces:
            desc = QuantizeByAmaxDesc.of(desc)
            keywords["amax"] = reduced
        operand = table.resolve(desc, x.device).run(x, **keywords)[int(self._turns)]
        return operand.data, operand.scale_inv

    def _extended(
        self, value: torch.Tensor, above: int, below: int, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return ``value`` with rows added that stand for those of other ranks in its blocks."""
        x = value.new_zeros(above + value.shape[0] + below, self._columns)
        x[above : above + value.shape[0]] = value
        of_blocks = reduced.view(len(self.cut_blocks), -1)
        bounds = self._shard.bounds[self._shard.rank :]
        for is_cut, row, bound in ((above, 0, bounds[0]), (below, -1, bounds[1])):
            if is_cut:
                # An amax is an element, so that it is exact in the dtype of the elements.
                amaxes = of_blocks[self.cut_blocks.index(bound // self._block)]
                x[row, :: self._width] = amaxes.to(x.dtype)
        return x


class WeakModule:
    """Refers to ``module``; a deep copy, as of the model, refers to the copy of the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._reference = weakref.ref(module)

    def __call__(self) -> torch.nn.Module | None:
        """Return the module; None once it is freed."""
        return self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        module = self()
        return self if module is None else WeakModule(copy.deepcopy(module, memo))


class _Sent(NamedTuple):
    """How to read one orientation from the gathered tensors.

    ``codes`` and ``scales`` are those that are known already; None: they are the next of the
    gathered tensors.
    """

    cast: RowCast
    shard: RowShard
    codes: torch.Tensor | None
    scales: torch.Tensor | None


Reduce = Callable[["GatheredWeight", Any], torch.Tensor]
"""Returns the amaxes of a weight, the maximum over the ranks of a mesh."""


def communicator_of(mesh: Any) -> Communicator:
    """Return the communicator of the ranks of ``mesh``, which has one dimension."""
    return of_group(mesh.get_group())


class GatheredWeight:
    """A weight ``[n, k]`` of ``module``, gathered as ``plan`` stores it.

    ``label`` is its path in the model. ``size`` is that of the unsharded weight. ``amaxes`` are the
    reduced ones of the latest step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        label: str,
        plan: TensorPlan,
        size: torch.Size,
        reduce: Reduce,
    ) -> None:
        # FSDP's state keeps the shard as the base of a view, a reference of torch's own that
        # garbage collection does not follow: a shard that kept its module would keep itself.
        self.module = WeakModule(module)
        self._name = name
        self.label = label
        self.plan = plan
        self.size = size
        self.amaxes: torch.Tensor | None = None
        self._reduce = reduce
        self._shard: ShardedWeight | None = None
        self._fsdp_parameter: torch.Tensor | None = None
        self.mesh: Any = None
        self._casts: list[RowCast] | None = None

    # The shard

    def _parameter(self) -> torch.nn.Parameter | None:
        module = self.module()
        return None if module is None else module._parameters.get(self._name)

    def shard(self) -> ShardedWeight | None:
        """Return this rank's rows, also while the module has the gathered weight."""
        parameter: Any = self._parameter()
        if isinstance(parameter, DTensor):
            # In inference mode torch returns a plain view in place of the shard itself.
            with torch.inference_mode(False), torch.no_grad():
                local = parameter.to_local()
            if isinstance(local, ShardedWeight):
                self._shard, self.mesh = local, parameter.device_mesh
                self._fsdp_parameter = parameter
        return self._shard

    def placed(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return ``value`` as a shard that is gathered by this weight, over the same memory: of a
        DTensor with the mesh, placements and size of ``like``, if that is one."""
        return as_part_of(ShardedWeight(value, self), like)

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter: this rank's rows as a DTensor, or the weight before ``fully_shard``."""
        self.shard()
        parameter = self._parameter() if self._fsdp_parameter is None else self._fsdp_parameter
        assert parameter is not None
        return parameter

    # Amaxes and casts

    def casts(self, communicator: Communicator, dtype: torch.dtype) -> list[RowCast]:
        """Return the casts of the orientations that are gathered."""
        if self._casts is None:
            rows, columns = self.size
            shard = RowShard.of(rows, communicator.rank, communicator.size)
            row, column = self.plan
            assert row is not None
            self._casts = [RowCast(row, dtype, columns, shard, turns=False)]
            if column is not None and not (row == column and row.block[0] == row.block[1]):
                self._casts.append(RowCast(column, dtype, columns, shard, turns=True))
        return self._casts

    def local_amaxes(self, communicator: Communicator) -> torch.Tensor:
        """Return the amaxes of this rank's rows, computed since the latest write to them."""
        shard = self.shard()
        assert shard is not None
        if shard.writes.amaxes is None:
            casts = self.casts(communicator, shard.dtype)
            shard.writes.amaxes = torch.cat([cast.amaxes(shard.value) for cast in casts])
        return shard.writes.amaxes

    # Methods that FSDP calls, by way of ShardedWeight

    def quantized(
        self, shard: ShardedWeight, mesh: Any, size: torch.Size
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the codes, padded as FSDP pads shards, with scales where all ranks have as many
        rows; and how to read them."""
        if shard.shape[1:] != size[1:]:
            raise UnsupportedError(
                f"{self.label}: a quantized gather of a weight that fully_shard shards along "
                f"dimension 1 is not offered. Leave out its shard_placement_fn, which gives "
                f"dimension 0."
            )
        amaxes = self._reduce(self, mesh)
        communicator = communicator_of(mesh)
        rows = RowShard.of(size[0], communicator.rank, communicator.size)
        casts = self.casts(communicator, shard.dtype)
        inputs: list[torch.Tensor] = []
        sent: list[_Sent] = []
        counts = [cast.num_amaxes for cast in casts]
        reduced = torch.split(amaxes.to(shard.device), counts)
        for cast, amax in zip(casts, reduced, strict=True):
            codes, scales = cast(shard.value, amax)
            if rows.num_ranks == 1 and inputs:  # FSDP takes the first tensor of a single rank
                sent.append(_Sent(cast, rows, codes, scales))
                continue
            inputs.append(_padded(codes, rows.each))
            if cast.covers_all_rows or rows.num_ranks == 1:
                sent.append(_Sent(cast, rows, None, scales))
                continue
            scales = _padded(scales, cast.max_scale_rows)
            if rows.is_even:
                inputs.append(scales)
                sent.append(_Sent(cast, rows, None, None))
            else:  # FSDP takes tensors of the padded shard's size alone
                gathered = communicator.gather(scales, "weight scales").wait()
                sent.append(_Sent(cast, rows, None, _in_order(gathered, cast)))
        return tuple(inputs), sent

    def assembled(
        self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]]:
        """Return the weight over the memory of ``outputs``, and the tensors that hold it."""
        parts = _parts(outputs, metadata)
        operands = [_operand(part, turns=bool(at)) for at, part in enumerate(parts)]
        columnwise = operands[1] if len(operands) > 1 else None
        weight = QuantizedTensor(operands[0], columnwise, self.plan, dtype)
        return weight, (*outputs, *[tensor for part in parts for tensor in part])

    def write(self, outputs: Sequence[torch.Tensor], metadata: Any, out: Any) -> None:
        """Write what ``out`` holds, but for what FSDP has gathered into the memory of the first
        gather already."""
        for at, part in enumerate(_parts(outputs, metadata)):
            operand = out.stored[at]
            for target, new in zip(operand, part, strict=False):
                if target.data_ptr() != new.data_ptr():
                    # Without counting a write: backward reads what forward saved, gathered again.
                    target.data.copy_(new.t() if at else new)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] == rows:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def _in_order(gathered: torch.Tensor, cast: RowCast) -> torch.Tensor:
    """Return the scales of all blocks, of the padded ones of each rank."""
    begin, step = cast.scales_begin, cast.max_scale_rows
    counts = [end - start for start, end in pairwise(begin)]
    if all(count == step for count in counts[:-1]):
        return gathered[: sum(counts)]
    return torch.cat([gathered[at * step :][:count] for at, count in enumerate(counts)])


def _parts(outputs: Sequence[torch.Tensor], metadata: Sequence[_Sent]) -> list[RowPart]:
    """Return codes and scales of all rows, by orientation."""
    left, parts = list(outputs), []
    for cast, shard, codes, scales in metadata:
        for cast_here in (codes, scales):
            if cast_here is not None:
                _outlast_readers(cast_here)
        if codes is None:
            codes = left.pop(0)[: shard.total]
        if scales is None:
            scales = _in_order(left.pop(0), cast)
        parts.append(RowPart(codes, scales))
    return parts


def _outlast_readers(cast_here: torch.Tensor) -> None:
    """Have the memory of a tensor reused only behind what the current stream reads of it.

    FSDP casts in a stream of its own, to which the memory belongs, and whose next cast would have
    it as soon as the host has freed it: before a layer that is enqueued has read the scale.
    """
    if not (cast_here.is_cpu or cast_here.is_meta):
        device = cast_here.device
        cast_here.record_stream(torch.get_device_module(device).current_stream(device))


def _operand(part: RowPart, *, turns: bool) -> Operand:
    return Operand(*([tensor.t() for tensor in part] if turns else part))
