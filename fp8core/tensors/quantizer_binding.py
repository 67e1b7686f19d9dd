"""From a tensor's plan, a device and a state to a quantizer to call.

A quantizer in low precision is one call of a backend, or, of a part of a tensor, two, between which
the amaxes of the parts are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    AmaxDesc,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    amax_extent,
    amax_sizes,
    has_amax,
)
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import DISPATCH, UNNAMED, Purpose, Resolved, Resolver
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import (
    Cast,
    CastAndSum,
    ColumnSums,
    Groups,
    HighPrecision,
    MixedPrecision,
    Observer,
    Orientations,
    Pair,
    Resolve,
    ResolveOptional,
    RowwiseTwice,
    Slot,
    TensorQuantizer,
)
from fp8core.torch_ops.repeats import called_in_repeats


class BoundQuantizer(TensorQuantizer):
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

    __slots__ = (
        *("_chunked", "_chunked_summing", "_summing", "_whole"),
        *("desc", "nonfinite", "slot"),
    )

    def __init__(
        self,
        desc: QuantizeDesc,
        resolve: Resolve,
        slot: Slot | None,
        nonfinite: torch.Tensor | None,
        resolve_variant: ResolveOptional | None = None,
    ) -> None:
        self.desc = desc
        self.slot = slot
        self.nonfinite = nonfinite
        whole = resolve(desc)
        self.choices: tuple[Choice, ...] = (whole.choice,)
        rowwise, columnwise = desc.halves()
        self._whole = whole
        self._both = self.with_slot(whole.run)
        self._rowwise = self.with_slot(resolve(rowwise).run)
        self._columnwise = self.with_slot(resolve(columnwise).run)

        def bound(variant: QuantizeDesc) -> Callable[..., Any] | None:
            if resolve_variant is None or desc.grouped:
                return None
            resolved = resolve_variant(variant, whole.choice.backend)
            return None if resolved is None else self.with_slot(resolved.run)

        # By orientations, rowwise and columnwise; None where the backend offers no sums.
        self._summing = {
            (True, True): bound(replace(desc, sums=True)),
            (True, False): bound(replace(rowwise, sums=True)),
            (False, True): bound(replace(columnwise, sums=True)),
        }
        self._chunked = bound(replace(desc, chunked=True))
        self._chunked_summing = bound(replace(desc, chunked=True, sums=True))

    @property
    def plan(self) -> TensorPlan | None:
        """How both orientations are quantized."""
        return TensorPlan(self.desc.rowwise, self.desc.columnwise)

    @property
    def casts_chunks(self) -> bool:
        """Whether the backend offers chunks; an operator of a captured graph does not."""
        return self._chunked is not None

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
        return self._chunked or self._both

    def cast_and_sum(self, sums: ColumnSums, *, rowwise: bool, columnwise: bool) -> CastAndSum:
        """Return the backend's own call for both, if it has one."""
        run = self._summing[rowwise, columnwise]
        if run is None:
            return super().cast_and_sum(sums, rowwise=rowwise, columnwise=columnwise)
        return run

    def cast_chunked_and_sum(self, sums: ColumnSums) -> CastAndSum:
        """Return the backend's own call for both, if it has one."""
        if self._chunked_summing is not None:
            return self._chunked_summing
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
    is_gradient: bool = False,
) -> TensorQuantizer:
    """Return the quantizer of a tensor of ``dtype`` planned as ``plan``.

    With ``slot`` it takes its scale there and records its amax; while observing it only records.
    To ``nonfinite``, int64 ``[1]``, its casts add the number of their NaN and inf; ``propagates``
    makes the scales of such a tensor NaN. ``reduce_amax`` reduces the amaxes that scales follow
    from; nothing calls it where there are none: in high precision, for scales of blocks, and for
    delayed scales, whose amaxes are reduced where they become scales. With ``dequantizes``, a
    columnwise operand in high precision beside a rowwise one in low precision is the latter. With
    ``is_gradient`` the variants of a gradient's cast are bound that its backend offers.

    Raises:
        UnsupportedError: no backend quantizes like that on the device; or ``propagates`` and
            ``reduce_amax`` together.
    """
    where = (grouped, offsets_on_device)
    resolve = partial(binding.resolver.resolve, device=binding.device, purpose=purpose)

    def resolve_variant(desc: OpDesc, backend: str) -> Resolved | None:
        return binding.resolver.resolve_optional(desc, binding.device, backend, purpose)

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
        variants = resolve_variant if is_gradient else None
        return LowPrecision(desc, resolve, slot, nonfinite, variants)

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
