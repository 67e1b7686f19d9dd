"""A high-precision weight, or a rank's rows of it, that FSDP2 gathers in low precision.

``torch.distributed.fsdp.fully_shard`` asks a tensor that has ``fsdp_pre_all_gather`` what to gather
in its stead, and ``fsdp_post_all_gather`` what to make of that. For all else the tensor is its
values: optimizers, clipping and checkpoints read and write those.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from fp8core.backend_api import AmaxDesc, OperandSpec, QuantizeByAmaxDesc, QuantizeDesc, has_amax
from fp8core.dispatch import table
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.values import is_view, wrapper_like, written
from fp8core.torch_ops.counted import counter_of
from fp8core.torch_ops.private import IS_PARAMETER, PIN_MEMORY, no_torch_function, pytree


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
        keywords = {"nonfinite_out": counter_of(x.device)}
        desc = self._desc
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


class Writes:
    """The values that a write to a tensor makes stale, shared by all its views: the
    ``amaxes`` of its rows, None since a write."""

    __slots__ = ("amaxes",)

    def __init__(self) -> None:
        self.amaxes: torch.Tensor | None = None

    def mark(self) -> None:
        """Note a write."""
        self.amaxes = None


class Gathering(Protocol):
    """Quantizes the rows of one weight, and puts together what was gathered of all ranks."""

    def quantized(
        self, shard: ShardedWeight, mesh: Any, size: torch.Size
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what FSDP gathers of ``shard``, part of a weight of ``size``, and what
        :meth:`assembled` needs besides."""

    def assembled(
        self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]]:
        """Return the weight, and the tensors with its memory, which FSDP frees."""

    def write(self, outputs: Sequence[torch.Tensor], metadata: Any, out: Any) -> None:
        """Complete ``out``, a weight of :meth:`assembled`, whose codes were gathered again."""


class ShardedWeight(torch.Tensor):
    """``value``, a plain tensor, with FSDP2's extensions of the all-gather; see the module.

    Views of it, copies and new tensors of its kind have the same class, as FSDP and modules make
    their shards and parameters by them; results of arithmetic are plain, and so is the tensor that
    is saved.
    """

    _value: torch.Tensor
    gathering: Gathering
    writes: Writes
    __torch_function__: ClassVar[Any] = no_torch_function

    @staticmethod
    def __new__(
        cls, value: torch.Tensor, gathering: Gathering, writes: Writes | None = None
    ) -> ShardedWeight:
        """Wrap ``value``; a view takes ``writes`` from the tensor that it is a view of."""
        value = value.detach()
        self: ShardedWeight = wrapper_like(cls, value)
        self._value = value
        self.gathering = gathering
        self.writes = Writes() if writes is None else writes
        return self

    @property
    def value(self) -> torch.Tensor:
        """The plain tensor, for reading; a write to it would not be noticed."""
        return self._value

    def plain(self) -> torch.Tensor:
        """Return the values as a plain tensor of the same memory; gradients flow back through it.

        Layers compute with it while FSDP does not manage the weight.
        """
        result: torch.Tensor = _Plain.apply(self)  # type: ignore[no-untyped-call]  # torch's
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors that FSDP gathers, and what it hands to the next method."""
        return self.gathering.quantized(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return the gathered weight and the tensors with its memory, or complete ``out``."""
        if out is None:
            return self.gathering.assembled(all_gather_outputs, metadata, param_dtype)
        self.gathering.write(all_gather_outputs, metadata, local_part(out))
        return None

    def __tensor_flatten__(self) -> tuple[list[str], Gathering]:
        return ["_value"], self.gathering

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], gathering: Gathering, outer_size: Any, outer_stride: Any
    ) -> ShardedWeight:
        return ShardedWeight(inner["_value"], gathering)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._value
        if getattr(self, IS_PARAMETER, False):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"ShardedWeight({self._value})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in pytree.tree_leaves(list(written(func, args, kwargs))):
            if isinstance(tensor, ShardedWeight):
                tensor.writes.mark()
        wrappers: dict[int, ShardedWeight] = {}

        def value_of(tensor: ShardedWeight) -> torch.Tensor:
            wrappers[id(tensor._value)] = tensor
            return tensor._value

        plain_args, plain_kwargs = pytree.tree_map_only(ShardedWeight, value_of, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        first = args[0] if args and isinstance(args[0], ShardedWeight) else None

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            wrapper = wrappers.get(id(tensor))
            if wrapper is not None or first is None:
                return tensor if wrapper is None else wrapper
            if is_view(func):
                return ShardedWeight(tensor, first.gathering, first.writes)
            if func.overloadpacket in _COPIES:
                return ShardedWeight(tensor, first.gathering)
            return tensor

        return pytree.tree_map_only(torch.Tensor, wrap, out)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: ShardedWeight) -> torch.Tensor:
        return weight.value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, another tensor as it is."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def as_part_of(local: torch.Tensor, whole: Any) -> torch.Tensor:
    """Return ``local`` as this rank's part of a DTensor that is placed as ``whole``; where that is
    a plain tensor, as it is."""
    if not hasattr(whole, "to_local"):
        return local
    part: torch.Tensor = type(whole).from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return part


def plain_for_writing(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor to which an operation of a backend writes the values of ``tensor``;
    another tensor than a ShardedWeight as it is."""
    if not isinstance(tensor, ShardedWeight):
        return tensor
    tensor.writes.mark()
    return tensor.value


_aten = torch.ops.aten
_COPIES = {_aten.clone, _aten._to_copy, PIN_MEMORY, _aten.empty_like, _aten.new_zeros}
