"""Finds the linears of a model that are called with the same input, which the first casts for all.

It looks at a call that is noted in a memo, never at one that repeats: a linear without siblings
costs nothing more. Those that have some go on, in the calls that repeat, with a
:class:`~fp8core.chain.linear.shared_input.SharedInput` between them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.chain import run as chain
from fp8core.chain.call import DENSE, Call
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.linear.shared_input import Place, SharedInput, SharingLink, holder_of
from fp8core.chain.series import Chain
from fp8core.modules.memo import Memo
from fp8core.recipe.plan import LinearPlan
from fp8core.tensors.delayed_state import LayerStates
from fp8core.torch_ops.private import is_capturing

_MOST_INPUTS = 64


class _First(NamedTuple):
    """The layer that was called first with the tensor of ``holder``, which lies at ``place``.

    ``cast`` is what decides how it casts that, and ``states`` are its delayed states, None without.
    ``run`` is that of its ``memo`` once it has ``readers``.
    """

    holder: weakref.ref[torch.Tensor]
    place: Place
    cast: tuple[object, ...]
    states: LayerStates | None
    layer: weakref.ref[Any]
    memo: Memo
    run: Callable[..., torch.Tensor | None]
    shared: SharedInput
    readers: weakref.WeakSet[Any]


class Siblings:
    """The inputs of the latest calls of a model's linears, none of which is kept alive.

    A copy begins without.
    """

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int], _First] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()

    def note(
        self, layer: Any, bound: Any, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
    ) -> None:
        """Note the call of ``layer``, bound so, that its memo has just got."""
        memo, place = layer._bindings.memo, Place.of(x) if x.dim() else None
        cast = _cast_of(bound) if call is DENSE else None
        if memo is None or place is None or cast is None:
            return
        holder, states, links = holder_of(x), bound.states, bound.parts[0]
        key = id(holder), place.address
        with self._lock:
            first = self._firsts.get(key)
            reads = (
                first is not None
                and first.holder() is holder
                and (first.place, first.cast) == (place, cast)
                and _is_there(first, layer)
                and _has_equal_scales(first.states, states)
            )
            amax = None if states is None else states.slot("input").amax
            if first is None or not reads:
                shared = SharedInput(amax, is_strict=states is not None)
            else:
                shared = first.shared
            link = SharingLink(links[0], shared, reads, amax, links.recorder)
            run = chain.prepared_run(Chain((link,)), x, params, call)
            if run is None:
                return
            if first is not None and reads:
                layer._bindings.memo = memo._replace(run=run)
                self._firsts[key] = _joined(first, layer)
                return
            self._firsts.pop(key, None)
            if len(self._firsts) >= _MOST_INPUTS:
                self._firsts.pop(next(iter(self._firsts)), None)
            gone = weakref.ref(holder, partial(_forget, self._firsts, key))
            who, readers = weakref.ref(layer), weakref.WeakSet[Any]()
            self._firsts[key] = _First(gone, place, cast, states, who, memo, run, shared, readers)


def _forget(
    firsts: dict[tuple[int, int], _First], key: tuple[int, int], gone: weakref.ref[torch.Tensor]
) -> None:
    """Forget the entry of a tensor that is gone, unless another tensor has its place."""
    first = firsts.get(key)
    if first is not None and first.holder is gone:
        firsts.pop(key, None)


def _is_there(first: _First, reader: Any) -> bool:
    """Return whether the layer of ``first`` is another than ``reader``, and has its memo still."""
    layer = first.layer()
    return layer is not None and layer is not reader and layer._bindings.memo is first.memo


def _joined(first: _First, reader: Any) -> _First:
    """Return ``first`` with one reader more; its layer casts for others from now on."""
    layer: Any = first.layer()
    memo = first.memo._replace(run=first.run)
    layer._bindings.memo = memo
    first.readers.add(reader)
    first.shared.num_readers = len(first.readers)
    return first._replace(memo=memo)


def _cast_of(bound: Any) -> tuple[object, ...] | None:
    """Return what decides how a layer casts its input; None if nobody can cast it for others."""
    links, plan = bound.parts[0], bound.plan
    if not isinstance(links, Chain) or len(links) != 1 or not isinstance(plan, LinearPlan):
        return None
    link = links[0]
    if type(link) is not LinearLink or link.only_once is None or link.needs_rng:
        return None
    choice = link.choices.get("input")  # None in high precision, as while it calibrates
    if choice is None or None in plan.input or plan.makers:
        return None
    how = plan.input, plan.nonfinite, plan.delayed, link.input_dtype
    return *how, link.input.row_step, link.input.columns_of, choice.backend


def _has_equal_scales(first: LayerStates | None, second: LayerStates | None) -> bool:
    """Return whether two layers cast their inputs by the same scale, now and after any step in
    which both have cast the same tensors. It waits for the device."""
    if first is None or second is None:
        return first is second
    if is_capturing():
        return False
    at = [states.names.forward.index("input") for states in (first, second)]
    scales, histories = (
        [buffer[..., place] for buffer, place in zip(buffers, at, strict=True)]
        for buffers in (
            (first.forward.scale, second.forward.scale),
            (first.forward.amax_history, second.forward.amax_history),
        )
    )
    return torch.equal(*scales) and torch.equal(*histories)
