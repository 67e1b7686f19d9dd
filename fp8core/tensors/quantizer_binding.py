"""From a tensor's plan, a device and a state to a quantizer to call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    AmaxDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
    UnsupportedError,
    has_amax,
)
from fp8core.dispatch.resolver import DISPATCH, UNNAMED, Purpose, Resolver
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.low_precision import BoundQuantizer, LowPrecision, Resolve
from fp8core.tensors.quantizer import BaseQuantizer, Groups, Orientations, Slot, TensorQuantizer
from fp8core.tensors.reduced_amax import MaximumOverShards, ReduceAmax, ReducedLowPrecision
from fp8core.tensors.values import HighPrecision

_E8M0_NAN = 0xFF
"""Source: OCP MX v1.0 sec. 5.4.1."""


class Propagating(BoundQuantizer):
    """Casts, and makes the scales of a tensor with NaN or inf NaN, and so all results of it.

    Each cast counts NaN and inf in a tensor of its own, and then adds the count to ``nonfinite``,
    which others read: three small kernels more, and none of a backend's fusions, pairs and chunks.
    """

    __slots__ = ()

    def __init__(self, inner: LowPrecision, nonfinite: torch.Tensor | None) -> None:
        self.choices = inner.choices
        self._both = propagating(inner.cast_to(rowwise=True, columnwise=True), nonfinite)
        self._rowwise = propagating(inner.cast_to(rowwise=True, columnwise=False), nonfinite)
        self._columnwise = propagating(inner.cast_to(rowwise=False, columnwise=True), nonfinite)


def propagating(
    run: Callable[..., Orientations], nonfinite: torch.Tensor | None
) -> Callable[..., Orientations]:
    """Return the cast ``run`` with scales of NaN for a tensor that is not finite."""

    def cast(x: torch.Tensor, *groups: torch.Tensor, **keywords: Any) -> Orientations:
        count = torch.zeros(1, dtype=torch.int64, device=x.device)
        operands = run(x, *groups, **keywords, nonfinite_out=count)
        if nonfinite is not None:
            nonfinite.add_(count)
        is_nonfinite = count > 0
        for operand in operands:
            if operand is not None:
                _mark(operand, is_nonfinite)
        return operands

    return cast


def _mark(operand: Operand, is_nonfinite: torch.Tensor) -> None:
    """Fill the outer scales of ``operand`` with NaN if ``is_nonfinite``, bool ``[1]``."""
    scales = operand.scale_inv if operand.global_scale_inv is None else operand.global_scale_inv
    assert scales is not None
    scales.masked_fill_(is_nonfinite, math.nan if scales.is_floating_point() else _E8M0_NAN)


class MixedPrecision(BaseQuantizer):
    """A quantizer of one orientation in low precision; the second stays in high precision."""

    __slots__ = ("_columnwise", "_rowwise", "choices")

    def __init__(self, rowwise: TensorQuantizer, columnwise: TensorQuantizer) -> None:
        self._rowwise = rowwise
        self._columnwise = columnwise
        self.choices = (*rowwise.choices, *columnwise.choices)

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Make each orientation by its own quantizer."""
        row = self._rowwise(x, groups, columnwise=False, rng=rng).rowwise if rowwise else None
        if not columnwise:
            return Orientations(row, None)
        return Orientations(row, self._columnwise(x, groups, rowwise=False, rng=rng).columnwise)


class RowwiseTwice(BaseQuantizer):
    """Low precision for both orientations: the columnwise operand is the rowwise one, which its
    reader dequantizes and transposes."""

    __slots__ = ("_rowwise", "choices")

    def __init__(self, rowwise: TensorQuantizer) -> None:
        self._rowwise = rowwise
        self.choices = rowwise.choices

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Quantize ``x`` rowwise."""
        operand = self._rowwise(x, groups, columnwise=False, rng=rng).rowwise
        return Orientations(operand if rowwise else None, operand if columnwise else None)


class Observer(BaseQuantizer):
    """Records the amax that ``desc`` would record, then hands the tensor to another quantizer."""

    __slots__ = ("_amax", "_inner", "_recorded", "choices")

    def __init__(
        self, inner: TensorQuantizer, desc: QuantizeDesc, resolve: Resolve, recorded: torch.Tensor
    ) -> None:
        self._inner = inner
        self._amax = resolve(AmaxDesc(desc)).run
        self._recorded = recorded
        self.choices = inner.choices

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Record, then quantize."""
        self._recorded.copy_(torch.maximum(self._recorded, self._amax(x, *groups)))
        return self._inner(x, groups, rowwise=rowwise, columnwise=columnwise, rng=rng)


class Binding(NamedTuple):
    """The common arguments of the quantizers of one layer; ``resolver`` finds their operations."""

    device: torch.device
    activation_dtype: torch.dtype
    is_observing: bool = False
    resolver: Resolver = DISPATCH


def bind_quantizer(
    plan: TensorPlan,
    dtype: torch.dtype,
    binding: Binding,
    *,
    purpose: Purpose = UNNAMED,
    grouped: bool = False,
    offsets_on_device: bool = False,
    slot: Slot | None = None,
    nonfinite: torch.Tensor | None = None,
    propagates: bool = False,
    reduce_amax: ReduceAmax | MaximumOverShards | None = None,
    dequantizes: bool = False,
) -> TensorQuantizer:
    """Return the quantizer of a tensor of ``dtype`` planned as ``plan``.

    With ``slot`` it takes its scale there and records its amax; while observing it only records.
    To ``nonfinite``, int64 ``[1]``, its casts add the number of their NaN and inf; ``propagates``
    makes the scales of such a tensor NaN. ``reduce_amax`` reduces the amaxes that scales follow
    from; nothing calls it where there are none: in high precision, for scales of blocks, and for
    delayed scales, whose amaxes are reduced where they become scales. With ``dequantizes``, a
    columnwise operand in high precision beside a rowwise one in low precision is the latter.

    Raises:
        UnsupportedError: no backend quantizes like that on the device; or ``propagates`` and
            ``reduce_amax`` together.
    """
    where = (grouped, offsets_on_device)
    resolve = partial(binding.resolver.resolve, device=binding.device, purpose=purpose)
    if binding.is_observing:
        inner = HighPrecision(binding.activation_dtype)
        if slot is None or slot.amax is None:
            return inner
        row, column = (spec if spec is not None and spec.delayed else None for spec in plan)
        recorded = QuantizeDesc(dtype, row, column, *where)
        return Observer(inner, recorded, resolve, slot.amax)
    if plan.rowwise is None and plan.columnwise is None:
        return HighPrecision(binding.activation_dtype)

    def low_precision(specs: TensorPlan) -> TensorQuantizer:
        desc = QuantizeDesc(dtype, *specs, *where)
        if reduce_amax is not None and has_amax(desc) and not specs.is_delayed:
            if propagates:
                raise UnsupportedError(
                    f"{desc}: nonfinite='propagate' marks the tensor that holds the NaN or inf, "
                    f"but with reduce_amax that is one part of several, whose scales have to be "
                    f"equal. nonfinite='saturate' works with reduce_amax."
                )
            return ReducedLowPrecision(desc, resolve, nonfinite, reduce_amax)
        if propagates:
            return Propagating(LowPrecision(desc, resolve, slot, None), nonfinite)
        return LowPrecision(desc, resolve, slot, nonfinite)

    if plan.rowwise is None or plan.columnwise is None:
        rest = plan._replace(rowwise=plan.rowwise or plan.columnwise)
        rest = rest._replace(columnwise=rest.rowwise)
        low = low_precision(rest)
        if dequantizes and plan.columnwise is None:
            return RowwiseTwice(low)
        high = HighPrecision(binding.activation_dtype)
        return MixedPrecision(high, low) if plan.rowwise is None else MixedPrecision(low, high)
    return low_precision(plan)


def bind_columnwise(
    spec: OperandSpec,
    dtype: torch.dtype,
    binding: Binding,
    *,
    purpose: Purpose = UNNAMED,
    propagates: bool = False,
) -> Callable[..., Orientations]:
    """Return the columnwise cast of a tensor of ``dtype`` that another cast counts and records.

    Called as ``cast(x)``, or as ``cast(x, scale=scale)`` for a delayed ``spec``, it records no amax
    and counts no NaN or inf; in a captured graph, where each cast counts for its device, it counts
    too. ``propagates`` is as in :func:`bind_quantizer`.

    Raises:
        UnsupportedError: no backend quantizes like that on the device.
    """
    desc = QuantizeDesc(dtype, None, spec)
    run = binding.resolver.resolve(desc, device=binding.device, purpose=purpose).run
    return propagating(run, None) if propagates else run
