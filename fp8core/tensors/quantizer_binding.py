"""From a tensor's plan, a device and a state to a quantizer to call.

A quantizer in low precision is one call of a backend, or, of a part of a tensor, two, between which
the amaxes of the parts are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    shares_amax,
)
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import DISPATCH, UNNAMED, Purpose, Resolver
from fp8core.errors import OperandError, UnsupportedError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import (
    Cast,
    HighPrecision,
    Orientations,
    Resolve,
    ResolveOptional,
    Slot,
    TensorQuantizer,
    Variant,
    completed,
    observed,
)
from fp8core.torch_ops.repeats import called_in_repeats


class LowPrecision(TensorQuantizer):
    """Low precision, in one call of the backend where both orientations are asked for."""

    __slots__ = ("desc", "nonfinite", "slot")

    def __init__(
        self,
        desc: QuantizeDesc,
        resolve: Resolve,
        slot: Slot | None,
        nonfinite: torch.Tensor | None,
        resolve_variant: ResolveOptional | None = None,
    ) -> None:
        self.desc, self.slot, self.nonfinite = desc, slot, nonfinite
        whole = resolve(desc)
        halves = desc.halves()
        rowwise, columnwise = (self.with_slot(resolve(half).run) for half in halves)
        variants: dict[Variant, Callable[..., Any]] = {}
        if resolve_variant is not None and not desc.grouped:
            descs = [replace(each, sums=True) for each in (desc, *halves)]
            descs += [replace(desc, chunked=True), replace(desc, chunked=True, sums=True)]
            for each in descs:
                resolved = resolve_variant(each, backend=whole.choice.backend)
                if resolved is not None:
                    ways = each.rowwise is not None, each.columnwise is not None
                    key = Variant(each.sums, each.chunked, *ways)
                    variants[key] = self.with_slot(resolved.run)
        # The delayed scale, where its amax is recorded, and the count of NaN and inf.
        constants = () if slot is None else (slot.scale, slot.amax)
        super().__init__(
            (self.with_slot(whole.run), rowwise, columnwise),
            (whole.choice,),
            plan=TensorPlan(desc.rowwise, desc.columnwise),
            constants=tuple(x for x in (*constants, nonfinite) if x is not None),
            variants=variants,
            row_step=desc.padded or 1,
        )

    def with_slot(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run`` with this tensor's delayed scale, amax and count filled in."""
        if self.slot is not None:
            run = self.slot.bound(run)
        return run if self.nonfinite is None else partial(run, nonfinite_out=self.nonfinite)


def with_slots(quantizers: Sequence[LowPrecision], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, a split cast, with the scale, amax and count of each half."""
    slots = [each.slot for each in quantizers if each.slot is not None]
    counts = tuple([each.nonfinite for each in quantizers])
    if slots:
        run = slots[0].bound_beside(slots[1], run)
    return run if set(counts) == {None} else partial(run, nonfinite_out=counts)


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


def reduced(
    desc: QuantizeDesc,
    resolve: Resolve,
    nonfinite: torch.Tensor | None,
    reduce_amax: ReduceAmax | MaximumOverShards,
) -> TensorQuantizer:
    """Return low precision for a part of a tensor: ``reduce_amax`` runs between amax and cast.

    Operands are the part's share of the whole tensor's, bit for bit. A backend's fusions and
    parts, which derive scales from the part, are not used, and no stored operand is taken as the
    result, as nobody knows the amaxes that its scales follow from.
    """

    def bind(desc: QuantizeDesc) -> tuple[Cast, tuple[Choice, ...]]:
        if not has_amax(desc):  # this orientation's scales belong to blocks
            plain = resolve(desc)
            return _counting(plain.run, nonfinite), (plain.choice,)
        amax = resolve(AmaxDesc(replace(desc, counted=False)))
        cast = resolve(QuantizeByAmaxDesc.of(desc))
        run = _reducing(desc, amax.run, reduce_amax, _counting(cast.run, nonfinite))
        return run, (amax.choice, cast.choice)

    both, choices = bind(desc)
    rowwise, columnwise = (bind(half)[0] for half in desc.halves())
    # All of it is two operations, and a reduction in between.
    constants = () if nonfinite is None else (nonfinite,)
    return TensorQuantizer((both, rowwise, columnwise), choices, constants=constants)


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


def propagating(
    run: Callable[..., Orientations], nonfinite: torch.Tensor | None
) -> Callable[..., Orientations]:
    """Return the cast ``run`` with scales of NaN for a tensor with NaN or inf, and so all results
    of it.

    Each cast counts NaN and inf in a tensor of its own, and then adds the count to ``nonfinite``,
    which others read: three small kernels more, and none of a backend's fusions and chunks.
    """

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


_NOT_MARKED = (
    "nonfinite='propagate' marks the tensor that holds the NaN or inf, but with reduce_amax that "
    "is one part of several, whose scales have to be equal. nonfinite='saturate' works with "
    "reduce_amax."
)


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
    padded: int = 0,
) -> TensorQuantizer:
    """Return the quantizer of a tensor of ``dtype`` planned as ``plan``.

    With ``slot`` it takes its scale there and records its amax; while observing it only records.
    To ``nonfinite``, int64 ``[1]``, its casts add the number of their NaN and inf; ``propagates``
    makes the scales of such a tensor NaN. ``reduce_amax`` reduces the amaxes that scales follow
    from; nothing calls it where there are none: in high precision, for scales of blocks, and for
    delayed scales, whose amaxes are reduced where they become scales. With ``dequantizes``, a
    columnwise operand in high precision beside a rowwise one in low precision is the latter. With
    ``is_gradient`` the variants of a gradient's cast are bound that its backend offers. With
    ``padded`` the columnwise operand has zeros up to a multiple of as many rows, as
    :func:`casts_padded` said that it can.

    Raises:
        UnsupportedError: no backend quantizes like that on the device; or ``propagates`` and
            ``reduce_amax`` together.
    """
    where = (grouped, offsets_on_device)
    resolve = partial(binding.resolver.resolve, device=binding.device, purpose=purpose)
    high = HighPrecision(binding.activation_dtype)
    if binding.is_observing:
        if slot is None or slot.amax is None:
            return high
        row, column = (spec if spec is not None and spec.delayed else None for spec in plan)
        recorded = QuantizeDesc(dtype, row, column, *where)
        return observed(high, resolve(AmaxDesc(recorded)).run, slot.amax)
    if plan.rowwise is None and plan.columnwise is None:
        return high
    specs = TensorPlan(plan.rowwise or plan.columnwise, plan.columnwise or plan.rowwise)
    is_counted = nonfinite is not None or propagates
    desc = QuantizeDesc(dtype, *specs, *where, counted=is_counted, padded=padded)
    low: TensorQuantizer
    if reduce_amax is not None and has_amax(desc) and not specs.is_delayed:
        if propagates:
            raise UnsupportedError(f"{desc}: {_NOT_MARKED}")
        low = reduced(desc, resolve, nonfinite, reduce_amax)
    elif propagates:
        marked = LowPrecision(desc, resolve, slot, None)
        both, rowwise, columnwise = (propagating(cast, nonfinite) for cast in marked.casts)
        casts, step = (both, rowwise, columnwise), marked.row_step
        low = TensorQuantizer(casts, marked.choices, row_step=step)
    else:
        optional = binding.resolver.resolve_optional
        variant = partial(optional, device=binding.device, purpose=purpose)
        low = LowPrecision(desc, resolve, slot, nonfinite, variant if is_gradient else None)
    return completed(low, high, plan, dequantizes=dequantizes)


def casts_padded(desc: QuantizeDesc, step: int, binding: Binding, purpose: Purpose) -> bool:
    """Return whether the backend that casts as ``desc`` says also does so with zeros up to a
    multiple of ``step`` rows."""
    resolver, device = binding.resolver, binding.device
    backend = resolver.resolve(desc, device, purpose).choice.backend
    padded = replace(desc, padded=step)
    return resolver.resolve_optional(padded, device, backend, purpose) is not None


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
    desc = QuantizeDesc(dtype, None, spec, counted=propagates)
    run = binding.resolver.resolve(desc, device=binding.device, purpose=purpose).run
    return propagating(run, None) if propagates else run


class CastsByAmax(NamedTuple):
    """The two halves of a cast, each by the amax of the tensor, which is computed once:
    ``rowwise(x, amax=amax(x))``. The rowwise half alone counts NaN and inf."""

    amax: Callable[[torch.Tensor], torch.Tensor]
    rowwise: Callable[..., Orientations]
    columnwise: Callable[..., Orientations]


def bind_by_amax(
    plan: TensorPlan,
    dtype: torch.dtype,
    binding: Binding,
    *,
    backend: str,
    purpose: Purpose = UNNAMED,
    nonfinite: torch.Tensor | None = None,
) -> CastsByAmax | None:
    """Return the halves of the cast of a tensor of ``dtype`` whose two scales follow from one amax;
    None for another tensor, or where ``backend`` lacks one of the operations."""
    desc = QuantizeDesc(dtype, *plan)
    if plan.is_delayed or not shares_amax(desc):
        return None
    descs: list[OpDesc] = [AmaxDesc(desc)]
    for half, is_counted in zip(desc.halves(), (nonfinite is not None, False), strict=True):
        descs.append(QuantizeByAmaxDesc.of(replace(half, counted=is_counted)))
    optional = binding.resolver.resolve_optional
    runs = [optional(each, binding.device, backend, purpose) for each in descs]
    amax, rowwise, columnwise = (None if each is None else each.run for each in runs)
    if amax is None or rowwise is None or columnwise is None:
        return None
    return CastsByAmax(amax, _counting(rowwise, nonfinite), columnwise)
