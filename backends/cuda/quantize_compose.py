"""Casts composed of other casts: of one an orientation where specs differ, of one a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fp8core.backend_api import Operand, Quantized, QuantizeDesc, amax_of_groups

Cast: TypeAlias = "Callable[..., Quantized]"


def apart(rowwise: Cast, columnwise: Cast) -> Cast:
    """Return the cast that takes each orientation from a cast of its own."""

    def run(
        x: torch.Tensor,
        *groups: torch.Tensor,
        nonfinite_out: torch.Tensor | None = None,
        **slots: torch.Tensor | None,
    ) -> Quantized:
        # The rowwise cast alone counts NaN and inf: both casts read the same elements.
        row = rowwise(x, *groups, nonfinite_out=nonfinite_out, **slots).rowwise
        return Quantized(row, columnwise(x, *groups, **slots).columnwise)

    return run


def is_one_call(desc: QuantizeDesc) -> bool:
    """Whether one native call casts both orientations: specs of bytes may differ in transform and
    rounding."""
    row, column = desc.rowwise, desc.columnwise
    if row is None or column is None or row == column:
        return True
    shared = [(x.format, x.block, x.scale_format, x.target) for x in (row, column)]
    return row.scale_format != "float32" and shared[0] == shared[1]


def composed(desc: QuantizeDesc, bind: Callable[[QuantizeDesc], Cast]) -> Cast:
    """Return the cast of ``desc`` of casts that ``bind`` returns: of one, or one an orientation,
    and of groups whose sizes the host knows one a group, unless it :func:`casts_groups`."""
    cast = bind(desc) if is_one_call(desc) else apart(*map(bind, desc.halves()))
    return in_groups(desc, cast) if desc.grouped and not casts_groups(desc) else cast


def casts_groups(desc: QuantizeDesc) -> bool:
    """Whether one native call casts all groups: they then lie apart in its columnwise codes."""
    spec = desc.rowwise or desc.columnwise
    is_float = spec is not None and spec.scale_format == "float32"
    return desc.grouped and (desc.offsets_on_device or (desc.padded > 0 and is_float))


def in_groups(desc: QuantizeDesc, dense: Cast) -> Cast:
    """Return the cast that quantizes each group of rows by ``dense`` and joins the operands.

    The offset of a group's ``rng`` is larger by the group's number.
    """

    def run(
        x: torch.Tensor,
        group_offsets: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
        **slots: torch.Tensor | None,
    ) -> Quantized:
        bounds = group_offsets.tolist()
        amaxes = None if amax is None else amax_of_groups(desc, amax, bounds, *x.shape)
        groups = []
        for group, (start, end) in enumerate(itertools.pairwise(bounds)):
            keywords = {
                name: slot[group : group + 1] for name, slot in slots.items() if slot is not None
            }
            if amaxes is not None:
                keywords["amax"] = amaxes[group]
            if rng is not None:
                keywords["rng"] = rng + torch.tensor((0, group), device="cpu")
            groups.append(dense(x[start:end], nonfinite_out=nonfinite_out, **keywords))
        return Quantized(
            _join([group.rowwise for group in groups], 0),
            _join([group.columnwise for group in groups], 1),
        )

    return run


def _join(operands: Sequence[Operand | None], dim: int) -> Operand | None:
    """Return the operand of all groups: along 0 for rowwise ones, along 1 for columnwise ones."""
    present = [operand for operand in operands if operand is not None]
    if not present:
        return None
    data, scale_inv, global_scale_inv = zip(*present, strict=True)
    joined = None if global_scale_inv[0] is None else torch.cat(global_scale_inv, dim)
    return Operand(torch.cat(data, dim), torch.cat(scale_inv, dim), joined)
