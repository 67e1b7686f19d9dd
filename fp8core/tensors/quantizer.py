"""Bound quantizers: a tensor's plan, a device and a state made into something to call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from fp8core.backend_api import (
    AmaxDesc,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    UnsupportedError,
    amax_extent,
    amax_sizes,
    has_amax,
)
from fp8core.dispatch.resolver import DISPATCH, UNNAMED, Purpose, Resolver
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
from fp8core.errors import OperandError
from fp8core.recipe.plan import TensorPlan
from fp8core.torch_ops.recorded import called_in_repeats

__all__ = [
    "BaseQuantizer",
    "Binding",
    "Cast",
    "Groups",
    "HighPrecision",
    "LowPrecision",
    "MaximumOverShards",
    "Orientations",
    "Pair",
    "Quantizer",
    "ReduceAmax",
    "RowwiseTwice",
    "Slot",
    "Unturned",
    "bind_columnwise",
    "bind_quantizer",
]

Groups: TypeAlias = "tuple[torch.Tensor, ...]"
"""``()`` for a dense operand, ``(group_offsets,)`` for a grouped one."""


class Orientations(NamedTuple):
    """A tensor's operands, None for the orientation that was not asked for."""

    rowwise: Any
    columnwise: Any


class Slot(NamedTuple):
    """A tensor's place in a delayed state: ``scale`` and ``amax``, one entry, or one a group.

    ``amax`` is None where nothing is to be recorded.
    """

    scale: torch.Tensor
    amax: torch.Tensor | None


Resolve: TypeAlias = Callable[[OpDesc], Resolved]
Cast: TypeAlias = "Callable[[torch.Tensor], Orientations]"
CastAndSum: TypeAlias = "Callable[[torch.Tensor], tuple[Orientations, torch.Tensor]]"
Pair: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], tuple[Orientations, Orientations]]"
ColumnSums: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


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


class Quantizer(Protocol):
    """Makes the operands of one tensor ``x [rows, cols]``; ``choices`` says who computes them."""

    choices: tuple[Choice, ...]

    @property
    def casts_chunks(self) -> bool:
        """Whether :meth:`cast_chunked` may return chunks; never in a captured graph."""

    @property
    def plan(self) -> TensorPlan | None:
        """How a stored tensor has to be quantized to be taken as the result; None where none is
        taken: for an orientation in high precision, reduced amaxes, and NaN that propagates."""

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors besides its argument that a cast reads and writes, if it is operations of
        backends and a reduction over ranks; None if it does more."""

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return the orientations asked for; ``rng`` as in QuantizeDesc."""

    def cast_to(self, *, rowwise: bool, columnwise: bool) -> Cast:
        """Return the call for dense tensors without ``rng`` that are always asked for alike."""

    def cast_chunked(self) -> Cast:
        """Return that call for both orientations, where ``rowwise`` is read once: it may be
        :class:`fp8core.backend_api.Chunks`."""

    def cast_and_sum(self, sums: ColumnSums, *, rowwise: bool, columnwise: bool) -> CastAndSum:
        """Return the call of :meth:`cast_to` that returns the column sums of the tensor as well:
        by ``sums`` where the backend does not offer both at once."""

    def cast_chunked_and_sum(self, sums: ColumnSums) -> CastAndSum:
        """Return the call of :meth:`cast_chunked` with column sums, complete with the chunks."""

    def pair_with(self, other: Quantizer) -> Pair | None:
        """Return the call for both orientations of this tensor and ``other``'s, if there is one."""


class BaseQuantizer:
    """Base of the quantizers: a backend's shortcuts, which a quantizer without one does without."""

    __slots__ = ()

    @property
    def casts_chunks(self) -> bool:
        """It makes none."""
        return False

    @property
    def plan(self) -> TensorPlan | None:
        """It takes no stored tensor as its result."""
        return None

    @property
    def constants(self) -> tuple[torch.Tensor, ...] | None:
        """It does more than operations of backends."""
        return None

    def cast_to(self: Quantizer, *, rowwise: bool, columnwise: bool) -> Cast:
        """Return the call for dense tensors without ``rng`` that are always asked for alike."""
        return partial(self, rowwise=rowwise, columnwise=columnwise)

    def cast_chunked(self: Quantizer) -> Cast:
        """Return the call for both orientations."""
        return self.cast_to(rowwise=True, columnwise=True)

    def cast_and_sum(
        self: Quantizer, sums: ColumnSums, *, rowwise: bool, columnwise: bool
    ) -> CastAndSum:
        """Return two calls in one."""
        return _one_by_one(self.cast_to(rowwise=rowwise, columnwise=columnwise), sums)

    def cast_chunked_and_sum(self: Quantizer, sums: ColumnSums) -> CastAndSum:
        """Return two calls in one."""
        return _one_by_one(self.cast_chunked(), sums)

    def pair_with(self, other: Quantizer) -> Pair | None:
        """There is none."""
        return None


def _one_by_one(cast: Cast, sums: ColumnSums) -> CastAndSum:
    def run(x: torch.Tensor) -> tuple[Orientations, torch.Tensor]:
        total = sums(x)
        return cast(x), total

    return run


_E8M0_NAN = 0xFF
"""Source: OCP MX v1.0 sec. 5.4.1."""


class HighPrecision(BaseQuantizer):
    """No quantization: the operands are the tensor in the activation dtype, and its view."""

    __slots__ = ("_dtype", "choices")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.choices: tuple[Choice, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` and ``x.T``."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        return Orientations(Operand(x) if rowwise else None, Operand(x.t()) if columnwise else None)


class Unturned(HighPrecision):
    """No quantization, and no view: both operands are the tensor itself, which its GEMM turns.

    What autograd saves is then the tensor that it knows, with its history.
    """

    __slots__ = ()

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return ``x`` for either orientation."""
        operand = Operand(x if x.dtype == self._dtype else x.to(self._dtype))
        return Orientations(operand if rowwise else None, operand if columnwise else None)


class _Bound(BaseQuantizer):
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


class LowPrecision(_Bound):
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
        return tuple(one for one in tensors if one is not None)

    def with_slot(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run`` with this tensor's delayed scale, amax and count filled in."""
        given: dict[str, torch.Tensor | None] = {}
        if self.slot is not None:
            given = {"scale": self.slot.scale, "amax_out": self.slot.amax}
        if self.nonfinite is not None:
            given["nonfinite_out"] = self.nonfinite
        return partial(run, **given) if given else run

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

    def pair_with(self, other: Quantizer) -> Pair | None:
        """Return the backend's own call for two tensors, if it has one for these."""
        if not isinstance(other, LowPrecision):
            return None
        run: Any = self._whole.pair_with(other._whole)
        if run is None:
            return None
        given: dict[str, tuple[torch.Tensor | None, ...]] = {}
        if self.slot is not None and other.slot is not None:
            scales, amaxes = zip(self.slot, other.slot, strict=True)
            given = {"scale": scales, "amax_out": amaxes}
        if self.nonfinite is not None or other.nonfinite is not None:
            given["nonfinite_out"] = (self.nonfinite, other.nonfinite)
        return partial(run, **given) if given else run


class ReducedLowPrecision(_Bound):
    """Low precision for a part of a tensor: ``reduce_amax`` runs between amax and cast.

    Operands are the part's share of the whole tensor's, bit for bit. It has none of a backend's
    fusions, pairs and parts, which derive scales from the part, and takes no stored operand as its
    result, as nobody knows which amaxes that one follows from.
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


class Propagating(_Bound):
    """Casts, and makes the scales of a tensor with NaN or inf NaN, and so all results of it.

    It counts for itself, and then adds to the count ``nonfinite`` that others read: three small
    kernels more in each cast, and none of a backend's fusions, pairs and chunks.
    """

    __slots__ = ()

    def __init__(self, inner: LowPrecision, nonfinite: torch.Tensor | None) -> None:
        self.choices = inner.choices
        self._both = _propagating(inner.cast_to(rowwise=True, columnwise=True), nonfinite)
        self._rowwise = _propagating(inner.cast_to(rowwise=True, columnwise=False), nonfinite)
        self._columnwise = _propagating(inner.cast_to(rowwise=False, columnwise=True), nonfinite)


def _propagating(
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


class Mixed(BaseQuantizer):
    """One orientation in low precision, the other in high precision."""

    __slots__ = ("_columnwise", "_rowwise", "choices")

    def __init__(self, rowwise: Quantizer, columnwise: Quantizer) -> None:
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

    def __init__(self, rowwise: Quantizer) -> None:
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
        self, inner: Quantizer, desc: QuantizeDesc, resolve: Resolve, recorded: torch.Tensor
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
    """What quantizers of one layer have in common; ``resolver`` finds their operations."""

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
) -> Quantizer:
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

    def low_precision(specs: TensorPlan) -> Quantizer:
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
        return Mixed(high, low) if plan.rowwise is None else Mixed(low, high)
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
    return _propagating(run, None) if propagates else run
