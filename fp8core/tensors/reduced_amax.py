"""The quantizer of a part of a tensor, whose amaxes are reduced before the cast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    AmaxDesc,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    amax_extent,
    amax_sizes,
    has_amax,
)
from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError
from fp8core.tensors.low_precision import BoundQuantizer, Resolve
from fp8core.tensors.quantizer import Cast
from fp8core.torch_ops.recorded import called_in_repeats

ReduceAmax: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
"""Takes the amaxes of a part of a tensor, float32 ``[n]`` as :class:`AmaxDesc` lays them out, and
returns those of the whole tensor: the maximum over all parts. A scale a row depends on one row
alone, so of such entries it reduces those whose row or column of the whole the parts share."""


class MaximumOverShards(NamedTuple):
    """Reduces the amaxes of a tensor whose rows are on several ranks, by ``maximum``.

    A scale of a single row stays with its rank; no collective is called where all are.
    """

    maximum: ReduceAmax

    def of(self, desc: QuantizeDesc, amaxes: torch.Tensor, cols: int, groups: int) -> torch.Tensor:
        """Return ``amaxes`` of ``desc`` reduced, for a tensor of ``cols`` columns."""
        if amax_extent(desc.rowwise) != "row":
            return self.maximum(amaxes)
        shared = amax_sizes(desc, 0, cols, groups)[1]
        if not shared:
            return amaxes
        return called_in_repeats(_joined, amaxes[:-shared], self.maximum(amaxes[-shared:]))


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


class ReducedLowPrecision(BoundQuantizer):
    """Low precision for a part of a tensor: ``reduce_amax`` runs between amax and cast.

    Operands are the part's share of the whole tensor's, bit for bit. A backend's fusions, pairs and
    parts, which derive scales from the part, are not used, and no stored operand is taken as the
    result, as nobody knows the amaxes that its scales follow from.
    """

    __slots__ = ("_nonfinite",)

    def __init__(
        self,
        desc: QuantizeDesc,
        resolve: Resolve,
        nonfinite: torch.Tensor | None,
        reduce_amax: ReduceAmax | MaximumOverShards,
    ) -> None:
        self._nonfinite = nonfinite

        def bind(desc: QuantizeDesc) -> tuple[Cast, tuple[Choice, ...]]:
            if not has_amax(desc):  # this orientation's scales belong to blocks
                plain = resolve(desc)
                return _counting(plain.run, nonfinite), (plain.choice,)
            amax = resolve(AmaxDesc(desc))
            cast = resolve(QuantizeByAmaxDesc.of(desc))
            run = _reducing(desc, amax.run, reduce_amax, _counting(cast.run, nonfinite))
            return run, (amax.choice, cast.choice)

        rowwise, columnwise = desc.halves()
        self._both, self.choices = bind(desc)
        self._rowwise, _ = bind(rowwise)
        self._columnwise, _ = bind(columnwise)

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The count of NaN and inf: what it does is two operations, and a reduction in between."""
        return () if self._nonfinite is None else (self._nonfinite,)


def _counting(run: Callable[..., Any], nonfinite: torch.Tensor | None) -> Callable[..., Any]:
    return run if nonfinite is None else partial(run, nonfinite_out=nonfinite)


def _reducing(
    desc: QuantizeDesc,
    amax: Callable[..., torch.Tensor],
    reduce_amax: ReduceAmax | MaximumOverShards,
    cast: Callable[..., Any],
) -> Callable[..., Any]:
    def run(x: torch.Tensor, *groups: torch.Tensor, **keywords: Any) -> Any:
        amaxes = amax(x, *groups)
        if isinstance(reduce_amax, MaximumOverShards):
            num_groups = groups[0].numel() - 1 if groups else 1
            reduced = reduce_amax.of(desc, amaxes, x.shape[1], num_groups)
        else:
            reduced = called_in_repeats(reduce_amax, amaxes)
        _check_reduced(reduced, amaxes)
        return cast(x, *groups, amax=reduced, **keywords)

    return run


def _check_reduced(reduced: object, amaxes: torch.Tensor) -> None:
    """Raise unless ``reduced`` can stand for ``amaxes``; by None the cast would use its own."""
    if not isinstance(reduced, torch.Tensor):
        raise OperandError(
            f"reduce_amax returned {reduced!r}; expected a tensor float32 {list(amaxes.shape)}. A "
            f"collective that writes in place, as torch.distributed.all_reduce, returns None: "
            f"return its tensor."
        )
    expected = (amaxes.dtype, amaxes.shape, amaxes.device)
    if (reduced.dtype, reduced.shape, reduced.device) != expected:
        raise OperandError(
            f"reduce_amax returned {reduced.dtype} {list(reduced.shape)} on {reduced.device}; "
            f"expected what it was given: {amaxes.dtype} {list(amaxes.shape)} on {amaxes.device}."
        )
