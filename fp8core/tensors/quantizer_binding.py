"""From a tensor's plan, a device and a state to a quantizer to call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fp8core.backend_api import OperandSpec, QuantizeDesc, UnsupportedError, has_amax
from fp8core.dispatch.resolver import DISPATCH, UNNAMED, Purpose, Resolver
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.composed_quantizers import Mixed, Observer, RowwiseTwice
from fp8core.tensors.high_precision import HighPrecision
from fp8core.tensors.low_precision import LowPrecision
from fp8core.tensors.propagating import Propagating, propagating
from fp8core.tensors.quantizer import Orientations, Quantizer, Slot
from fp8core.tensors.reduced_amax import MaximumOverShards, ReduceAmax, ReducedLowPrecision

__all__ = ["Binding", "bind_columnwise", "bind_quantizer"]


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
    return propagating(run, None) if propagates else run
