"""Amaxes, computed apart from the cast whose scales follow from them.

A caller that has one part of a tensor reduces the part's amaxes over all parts before the cast; the
cast then gives the part's share of the whole tensor's operands. Without a reduction::

    quantize(x) == quantize(x, amax=amax(x))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from fp8core.backend_api.descriptors import QuantizeDesc, num_groups
from fp8core.backend_api.operand_spec import OperandSpec, plain_text
from fp8core.backend_api.record import ResultShape, operation
from fp8core.errors import OperandError


@dataclass(frozen=True, slots=True)
class ScaleUpdateDesc:
    """``scale_update(histories, scales, targets, nonfinite=()) -> None``: all modules at once.

    For every slot ``s`` of every state, ``histories[i] [length, slots]`` and ``scales[i] [slots]``
    in float32, updated in place: entry 0 of the history holds the newest amax, rows 1 to
    length - 1 the older ones, the oldest first. See numerics.md's table of DelayedScaling: the amax
    of the window is taken first, then the window rolls and entry 0 becomes 0; ``scale = target /
    amax``, unless amax is 0 or not finite (then nothing of that slot changes but entry 0).
    ``nonfinite[i]``, int64 ``[1]``, grows by the number of newest amaxes that are not finite; an
    empty sequence counts nothing.

    ``algorithm`` is ``"max"`` or ``"most_recent"``.

    Optional, for calls outside of graphs: with ``prepared`` the call returns the update of its
    tensors, in every later step, as a function of no arguments. The tensors remain the same
    objects; their storage may be replaced between two steps (``.data``, ``set_``).
    """

    op: ClassVar[str] = "scale_update"
    low_precision: ClassVar[bool] = False
    algorithm: str
    prepared: bool = False
    __str__ = plain_text


@operation(writes=("histories", "scales", "nonfinite"))
def scale_update(
    desc: ScaleUpdateDesc,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    nonfinite: Sequence[torch.Tensor] = (),
) -> None:
    """Return None: an update has no result."""


@dataclass(frozen=True, slots=True)
class AmaxDesc:
    """``amax(x, group_offsets=None) -> float32 [n]``: the amaxes from which scales of ``quantize``
    follow.

    ``x`` and ``group_offsets`` are those of ``quantize``, a plain :class:`QuantizeDesc`. Entries of
    the rowwise orientation come first, then those of the columnwise one:

    - one for the tensor, or one a group, where a float32 scale covers the tensor: a delayed scale
      too, and the outer scale of two levels;
    - one a row of the operand where a scale covers a row: the outer scale of two levels too. Rows
      of the rowwise operand are the rows of ``x``; those of the columnwise operand are its columns,
      ``cols`` entries for each group in turn;
    - none where every scale follows from its own block along k. A descriptor without any entry is
      unsupported.

    Two orientations with an amax of the tensor, neither with a transform, share their entries. An
    orientation with a transform has the amaxes of the transformed elements. :func:`split_amax`
    gives the entries of each orientation.

    An amax is the largest magnitude; NaN elements are ignored, inf is not. The amax of no elements,
    or of NaN alone, is 0: so for an empty tensor, an empty group, and a row that belongs to no
    group.
    """

    op: ClassVar[str] = "amax"
    low_precision: ClassVar[bool] = False
    quantize: QuantizeDesc
    __str__ = plain_text


@dataclass(frozen=True, slots=True)
class QuantizeByAmaxDesc(QuantizeDesc):
    """Quantization by given amaxes: the call of :class:`QuantizeDesc` with ``amax``.

    ``amax`` (float32 ``[n]``, contiguous) has the result of :class:`AmaxDesc` for ``x``, or larger
    values: a reduction over the parts of a larger tensor. A scale with an amax follows from the
    amax alone, never from ``x``; elements beyond the amax saturate. Scales of blocks, also the
    inner scales of two levels, follow from ``x`` as without ``amax``. Delayed specs, whose scale is
    an argument, and specs without any amax are unsupported, and nothing is fused with this cast.
    """

    @classmethod
    def of(cls, desc: QuantizeDesc) -> QuantizeByAmaxDesc:
        """Return the descriptor of the cast of ``desc`` by amaxes of the caller."""
        return cls(**_shared_fields(desc))

    def plain(self) -> QuantizeDesc:
        """Return the descriptor of the same cast by the amaxes of ``x`` itself."""
        return QuantizeDesc(**_shared_fields(self))


def _shared_fields(desc: QuantizeDesc) -> dict[str, Any]:
    """Return the fields of a cast that a cast by given amaxes has as well."""
    names = ("dtype", "rowwise", "columnwise", "grouped", "offsets_on_device", "counted")
    return {name: getattr(desc, name) for name in names}


class Amaxes(NamedTuple):
    """The entries of an amax by orientation, one-dimensional views; None where there are none.

    Both are the same view where the orientations share their entries.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None


def amax_extent(spec: OperandSpec | None) -> Literal["tensor", "row"] | None:
    """Return what an amax of ``spec`` covers, None where scales follow from their blocks alone.

    >>> [amax_extent(OperandSpec("e4m3", block, 448.0)) for block in ((0, 0), (1, 0), (1, 128))]
    ['tensor', 'row', None]
    >>> amax_extent(OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3"))
    'tensor'
    """
    if spec is None:
        return None
    if spec.scale_format == "e4m3":
        return "row" if spec.row_scaled else "tensor"
    if spec.block == (0, 0):
        return "tensor"
    return "row" if spec.block[1] == 0 else None


def has_amax(desc: QuantizeDesc) -> bool:
    """Say whether ``desc`` has amaxes: a scale of the tensor or of a row, in an orientation."""
    return amax_extent(desc.rowwise) is not None or amax_extent(desc.columnwise) is not None


def shares_amax(desc: QuantizeDesc) -> bool:
    """Say whether both orientations have the same amaxes, whose entries are then listed once."""
    return all(
        spec is not None and amax_extent(spec) == "tensor" and spec.transform is None
        for spec in (desc.rowwise, desc.columnwise)
    )


def amax_sizes(desc: QuantizeDesc, rows: int, cols: int, groups: int = 1) -> tuple[int, int]:
    """Return the number of entries of the rowwise and of the columnwise orientation.

    Shared entries count as rowwise. ``groups`` is 1 for a dense tensor.

    >>> rowwise = OperandSpec("e4m3", (1, 0), 448.0)
    >>> amax_sizes(QuantizeDesc(torch.bfloat16, rowwise, rowwise), 8, 5)
    (8, 5)
    """
    num_rowwise = {"tensor": groups, "row": rows, None: 0}[amax_extent(desc.rowwise)]
    if shares_amax(desc):
        return num_rowwise, 0
    return num_rowwise, {"tensor": groups, "row": cols * groups, None: 0}[
        amax_extent(desc.columnwise)
    ]


def split_amax(
    desc: QuantizeDesc, amax: torch.Tensor, rows: int, cols: int, groups: int = 1
) -> Amaxes:
    """Return the entries of ``amax`` by orientation, as views; see :class:`AmaxDesc`.

    Raises:
        OperandError: ``amax`` is not float32 of as many entries as a tensor ``[rows, cols]`` has.
    """
    num_rowwise, num_columnwise = amax_sizes(desc, rows, cols, groups)
    total = num_rowwise + num_columnwise
    if amax.dtype != torch.float32 or amax.shape != (total,):
        raise OperandError(
            f"amax is {amax.dtype} {list(amax.shape)}, but {desc} of {rows} x {cols} in {groups} "
            f"group(s) has float32 [{total}]: {num_rowwise} rowwise, then {num_columnwise}."
        )
    rowwise = None if amax_extent(desc.rowwise) is None else amax[:num_rowwise]
    if shares_amax(desc):
        return Amaxes(rowwise, rowwise)
    return Amaxes(rowwise, None if amax_extent(desc.columnwise) is None else amax[num_rowwise:])


@operation(schema="(str operation, Tensor x, Tensor? group_offsets=None) -> Tensor")
def amax(desc: AmaxDesc, x: torch.Tensor, group_offsets: torch.Tensor | None = None) -> ResultShape:
    """Return the shape of the amaxes of both orientations."""
    rows, cols = x.shape
    groups = 1 if group_offsets is None else num_groups(group_offsets)
    return ResultShape((sum(amax_sizes(desc.quantize, rows, cols, groups)),), torch.float32)


def amax_of_groups(
    desc: QuantizeDesc, amax: torch.Tensor, bounds: Sequence[int], rows: int, cols: int
) -> list[torch.Tensor]:
    """Return an amax for each group, with the entries of a dense tensor of the group's rows;
    ``bounds`` are the group offsets.

    Raises:
        OperandError: as in :func:`split_amax`.
    """
    rowwise, columnwise = split_amax(desc, amax, rows, cols, len(bounds) - 1)
    of_groups: list[torch.Tensor] = []
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        entry, columns = slice(group, group + 1), slice(group * cols, (group + 1) * cols)
        entries: list[torch.Tensor] = []
        if rowwise is not None:
            entries.append(
                rowwise[slice(start, end) if amax_extent(desc.rowwise) == "row" else entry]
            )
        if columnwise is not None and not shares_amax(desc):
            is_of_columns = amax_extent(desc.columnwise) == "row"
            entries.append(columnwise[columns if is_of_columns else entry])
        of_groups.append(entries[0] if len(entries) == 1 else torch.cat(entries))
    return of_groups
