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
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    has_amax,
)
from fp8core.collectives import Communicator, of_group
from fp8core.dispatch import policy, table
from fp8core.errors import UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import ShardedWeight, as_part_of
from fp8core.torch_ops.nonfinite import counter_of_writes
from fp8core.torch_ops.private import local_tensor


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
        self._bound: dict[object, tuple[policy.Policy, Callable[..., Any]]] = {}
        self._turns = turns
        self._columns = columns
        self.shard = shard
        self.is_alone = shard.num_ranks == 1
        self.is_even = not self.is_alone and shard.each * shard.num_ranks == shard.total
        self._block, self._width = spec.block[::-1] if turns else spec.block
        # Whether each scale covers all rows of the matrix.
        self.covers_all_rows = self._block == 0
        # A scale a row of the matrix depends on that row alone.
        self._reduces = has_amax(self._desc) and self._block != 1

    @cached_property
    def cut_blocks(self) -> list[int]:
        """The numbers of the blocks of rows that a boundary between ranks cuts, ascending."""
        if self._block < 2:
            return []
        inner = [bound for bound in self.shard.bounds[1:-1] if bound < self.shard.total]
        return sorted({bound // self._block for bound in inner if bound % self._block})

    @cached_property
    def scales_begin(self) -> list[int]:
        """By rank, the number of the first block that begins in its rows; then of all blocks."""
        return [-(-bound // self._block) for bound in self.shard.bounds]

    @cached_property
    def max_scale_rows(self) -> int:
        """The most rows of scales that any rank holds."""
        if self.covers_all_rows:
            return 1
        return max(end - start for start, end in pairwise(self.scales_begin))

    @cached_property
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
        if self._reduces and value.numel():
            amaxes: torch.Tensor = self._bound_to(value.device, None)(value)
            return amaxes
        zeros = torch.zeros(self.num_amaxes, dtype=torch.float32, device=value.device)
        if not value.numel() or not self.num_amaxes:
            return zeros
        first = self.shard.bounds[self.shard.rank]
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
        first, last, start, end = self._rows
        is_extended = (start, end) != (first, last)
        x = self._extended(value, first - start, end - last, reduced) if is_extended else value
        count = counter_of_writes(x.device)
        keywords = {"amax": reduced} if self._reduces else {}
        if count is not None:
            keywords["nonfinite_out"] = count
        cast = self._bound_to(x.device, count is not None)
        codes, scales, _ = cast(x, **keywords)[self._turns]
        if self._turns:
            codes, scales = codes.t(), scales.t()
        if is_extended:
            codes, scales = codes[first - start :][: last - first], scales[int(start < first) :]
        return RowPart(codes.contiguous(), scales.contiguous())

    @cached_property
    def _rows(self) -> tuple[int, int, int, int]:
        """The first row and the last, exclusive, and those of the whole blocks around them."""
        block, shard = self._block, self.shard
        first, last = shard.bounds[shard.rank :][:2]
        if block < 2 or first == last or not self._columns:
            return first, last, first, last
        return first, last, first // block * block, min(-(-last // block) * block, shard.total)

    def _bound_to(self, device: torch.device, is_counted: bool | None) -> Callable[..., Any]:
        """Return the cast, or the amax for None, resolved once for a device and a policy, as layers
        bind what they run."""
        chosen = policy.current()
        bound, run = self._bound.get((device, is_counted), (None, None))
        if run is None or bound is not chosen:
            desc: OpDesc = AmaxDesc(self._desc)
            if is_counted is not None:
                kind = QuantizeByAmaxDesc.of if self._reduces else dataclasses.replace
                desc = kind(dataclasses.replace(self._desc, counted=is_counted))
            run = table.resolve(desc, device).run
            self._bound[device, is_counted] = chosen, run
        return run

    def _extended(
        self, value: torch.Tensor, above: int, below: int, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return ``value`` with rows added that stand for those of other ranks in its blocks."""
        x = value.new_zeros(above + value.shape[0] + below, self._columns)
        x[above : above + value.shape[0]] = value
        of_blocks = reduced.view(len(self.cut_blocks), -1)
        bounds = self.shard.bounds[self.shard.rank :]
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
    codes: torch.Tensor | None
    scales: torch.Tensor | None


Reduce = Callable[["GatheredWeight", Any], Sequence[torch.Tensor]]
"""Returns the amaxes of a weight, the maximum over the ranks of a mesh, for each of its casts."""


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
        self.amaxes: Sequence[torch.Tensor] | None = None
        self._reduce = reduce
        self._shard: ShardedWeight | None = None
        self._fsdp_parameter: torch.Tensor | None = None
        self.mesh: Any = None
        self._casts: list[RowCast] = []
        self._casts_of: tuple[Any, torch.dtype] | None = None
        self.is_gathered_whole = False

    # The shard

    def _parameter(self) -> torch.nn.Parameter | None:
        module = self.module()
        return None if module is None else module._parameters.get(self._name)

    def shard(self) -> ShardedWeight | None:
        """Return this rank's rows, also while the module has the gathered weight."""
        parameter: Any = self._parameter()
        if isinstance(parameter, DTensor):
            local = local_tensor(parameter)
            if local is not self._shard and isinstance(local, ShardedWeight):
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

    def casts(self, mesh: Any, dtype: torch.dtype) -> list[RowCast]:
        """Return this rank's casts to the orientations that are gathered over ``mesh``."""
        if self._casts_of != (mesh, dtype):
            rows, columns = self.size
            communicator = communicator_of(mesh)
            shard = RowShard.of(rows, communicator.rank, communicator.size)
            row, column = self.plan
            assert row is not None
            self._casts = [RowCast(row, dtype, columns, shard, turns=False)]
            if column is not None and not (row == column and row.block[0] == row.block[1]):
                self._casts.append(RowCast(column, dtype, columns, shard, turns=True))
            self._casts_of = mesh, dtype
        return self._casts

    def local_amaxes(self, mesh: Any) -> tuple[Sequence[RowCast], torch.Tensor]:
        """Return the casts, and the amaxes of this rank's rows for them, one behind the other,
        computed since the latest write to the rows."""
        shard = self.shard()
        assert shard is not None
        casts = self.casts(mesh, shard.dtype)
        if shard.writes.amaxes is None:
            shard.writes.amaxes = torch.cat([cast.amaxes(shard.value) for cast in casts])
        return casts, shard.writes.amaxes

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredWeight:
        """Copy nothing for shards alone, as of a state: torch copies no sharded module."""
        if self.shard() is not None and id(self.module()) not in memo:
            return self
        memo[id(self)] = copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

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
        inputs: list[torch.Tensor] = []
        sent: list[_Sent] = []
        for cast, amax in zip(self.casts(mesh, shard.dtype), amaxes, strict=True):
            codes, scales = cast(shard.value, amax.to(shard.device))
            if cast.is_alone and inputs:  # FSDP takes the first tensor of a single rank
                sent.append(_Sent(cast, codes, scales))
                continue
            if cast.is_even:
                inputs += (codes, _padded(scales, cast.max_scale_rows))
                sent.append(_Sent(cast, None, None))
                continue
            inputs.append(_padded(codes, cast.shard.each))
            if not (cast.is_alone or cast.covers_all_rows):
                # FSDP takes tensors of the padded shard's size alone.
                scales = _padded(scales, cast.max_scale_rows)
                scales = communicator_of(mesh).gather(scales, "weight scales").wait()
                scales = _in_order(scales, cast)
            sent.append(_Sent(cast, None, scales))
        return tuple(inputs), sent

    def assembled(
        self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]]:
        """Return the weight over the memory of ``outputs``, and the tensors that hold it."""
        parts = _parts(outputs, metadata)
        operands = [
            Operand(*([x.t() for x in part] if at else part)) for at, part in enumerate(parts)
        ]
        columnwise = operands[1] if len(operands) > 1 else None
        weight = QuantizedTensor(operands[0], columnwise, self.plan, dtype)
        # FSDP allocates and frees what it gathers; the rest is written by each gather.
        memory = [tensor.untyped_storage().data_ptr() for tensor in outputs]
        tensors = [tensor for part in parts for tensor in part]
        rest = [each for each in tensors if each.untyped_storage().data_ptr() not in memory]
        self.is_gathered_whole = not rest
        return weight, tuple(rest)

    def write(self, outputs: Sequence[torch.Tensor], metadata: Any, out: Any) -> None:
        """Write what ``out`` holds, but for what FSDP has gathered into the memory of the first
        gather already."""
        stored = out.stored
        for at, part in enumerate(_parts(outputs, metadata)):
            for target, new in zip(stored[at], part, strict=False):
                if target.data_ptr() != new.data_ptr():
                    # Without counting a write: backward reads what forward saved, gathered again.
                    target.data.copy_(new.t() if at else new)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] == rows:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def _in_order(gathered: torch.Tensor, cast: RowCast) -> torch.Tensor:
    """Return the scales of all blocks, of the padded ones of each rank; of scales that cover all
    rows those of one rank."""
    if cast.covers_all_rows:
        return gathered[:1]
    begin, step = cast.scales_begin, cast.max_scale_rows
    counts = [end - start for start, end in pairwise(begin)]
    if all(count == step for count in counts[:-1]):
        return gathered[: sum(counts)]
    return torch.cat([gathered[at * step :][:count] for at, count in enumerate(counts)])


def _parts(outputs: Sequence[torch.Tensor], metadata: Sequence[_Sent]) -> list[RowPart]:
    """Return codes and scales of all rows, by orientation."""
    left, parts = list(outputs), []
    for cast, codes, scales in metadata:
        for cast_here in (codes, scales):
            if cast_here is not None:
                _outlast_readers(cast_here)
        if codes is None:
            codes = left.pop(0)[: cast.shard.total]
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
