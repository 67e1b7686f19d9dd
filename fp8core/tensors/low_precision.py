"""The quantizer of a tensor in low precision, by one call of a backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import OpDesc, QuantizeDesc
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import (
    BaseQuantizer,
    CastAndSum,
    ColumnSums,
    Groups,
    Orientations,
    Pair,
    Slot,
    TensorQuantizer,
)

Resolve: TypeAlias = Callable[[OpDesc], Resolved]


class BoundQuantizer(BaseQuantizer):
    """Low precision by three bound calls: for both orientations, and for either one."""

    __slots__ = ("_both", "_columnwise", "_rowwise", "choices")

    _both: Callable[..., Orientations]
    _rowwise: Callable[..., Orientations]
    _columnwise: Callable[..., Orientations]

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Quantize ``x``."""
        run = self.cast_to(rowwise=rowwise, columnwise=columnwise)
        return run(x, *groups) if rng is None else run(x, *groups, rng=rng)

    def cast_to(self, *, rowwise: bool, columnwise: bool) -> Callable[..., Orientations]:
        """Return the bound call of these orientations, with nothing in between."""
        both_or_column = self._both if rowwise else self._columnwise
        return both_or_column if columnwise else self._rowwise


class LowPrecision(BoundQuantizer):
    """Low precision, in one call of the backend where both orientations are asked for."""

    __slots__ = ("_chunked", "_summing", "_whole", "desc", "nonfinite", "slot")

    def __init__(
        self,
        desc: QuantizeDesc,
        resolve: Resolve,
        slot: Slot | None,
        nonfinite: torch.Tensor | None,
    ) -> None:
        self.desc = desc
        self.slot = slot
        self.nonfinite = nonfinite
        whole = resolve(desc)
        self.choices: tuple[Choice, ...] = (whole.choice,)
        rowwise, columnwise = desc.halves()
        self._whole = whole
        self._both = self.with_slot(whole.run)
        self._chunked = self.with_slot(whole.offers.quantize_chunked or whole.run)
        row, column = resolve(rowwise), resolve(columnwise)
        self._rowwise = self.with_slot(row.run)
        self._columnwise = self.with_slot(column.run)
        # By orientations, rowwise and columnwise; None where the backend offers no sums.
        self._summing = {
            (True, True): whole.offers.quantize_and_sum,
            (True, False): row.offers.quantize_and_sum,
            (False, True): column.offers.quantize_and_sum,
        }

    @property
    def plan(self) -> TensorPlan | None:
        """How both orientations are quantized."""
        return TensorPlan(self.desc.rowwise, self.desc.columnwise)

    @property
    def casts_chunks(self) -> bool:
        """Whether the backend offers chunks; an operator of a captured graph does not."""
        return self._whole.offers.quantize_chunked is not None

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The delayed scale, where its amax is recorded, and the count of NaN and inf."""
        tensors = (*(self.slot or ()), self.nonfinite)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def with_slot(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run`` with this tensor's delayed scale, amax and count filled in."""
        state: dict[str, torch.Tensor | None] = {}
        if self.slot is not None:
            state = {"scale": self.slot.scale, "amax_out": self.slot.amax}
        if self.nonfinite is not None:
            state["nonfinite_out"] = self.nonfinite
        return partial(run, **state) if state else run

    def cast_chunked(self) -> Callable[..., Orientations]:
        """Return the backend's own call, in chunks where it offers them."""
        return self._chunked

    def cast_and_sum(self, sums: ColumnSums, *, rowwise: bool, columnwise: bool) -> CastAndSum:
        """Return the backend's own call for both, if it has one."""
        run = self._summing[rowwise, columnwise]
        if run is None:
            return super().cast_and_sum(sums, rowwise=rowwise, columnwise=columnwise)
        return self.with_slot(run)

    def cast_chunked_and_sum(self, sums: ColumnSums) -> CastAndSum:
        """Return the backend's own call for both, if it has one."""
        run = self._whole.offers.quantize_chunked_and_sum
        if run is not None:
            return self.with_slot(run)
        if self.casts_chunks:
            return super().cast_chunked_and_sum(sums)
        return self.cast_and_sum(sums, rowwise=True, columnwise=True)

    def pair_with(self, second: TensorQuantizer) -> Pair | None:
        """Return the backend's own call for both tensors, if there is any."""
        if not isinstance(second, LowPrecision):
            return None
        run: Any = self._whole.pair_with(second._whole)
        if run is None:
            return None
        states: dict[str, tuple[torch.Tensor | None, ...]] = {}
        if self.slot is not None and second.slot is not None:
            scales, amaxes = zip(self.slot, second.slot, strict=True)
            states = {"scale": scales, "amax_out": amaxes}
        if self.nonfinite is not None or second.nonfinite is not None:
            states["nonfinite_out"] = (self.nonfinite, second.nonfinite)
        return partial(run, **states) if states else run
