"""The bound links of a layer, by recipe, device, dtype and policy, and the state they share."""

from __future__ import annotations

import threading
from typing import Any

import torch

from fp8core.chain.shape import Watch
from fp8core.modules.agreement import Agreement
from fp8core.modules.memo import Memo
from fp8core.recipe import Recipe
from fp8core.tensors.delayed_state import LayerStates, Order, new_order
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops.nonfinite import new_counter

bind_lock = threading.RLock()
"""Held while a layer is bound: two threads that use it for the first time must not each create its
delayed state."""


class Bindings:
    """A layer's bound links by key, and the delayed states, weights and counters they use.

    A copy of the layer starts with an empty one, as everything here refers to the tensors of one
    layer. ``table`` holds the links bound for ``watch``, which is None in most layers, and ``last``
    the key and the links of the last call. Those bound without a watch are set aside while there is
    one, and run again afterwards.
    ``agreement`` is what the ranks have compared, of a layer over ranks.
    ``memo`` is that of the last call that may be repeated. ``recipe`` is the class of the last
    recipe in low precision.
    """

    __slots__ = (
        *("_unwatched", "agreement", "last", "memo", "nonfinite", "order", "recipe", "states"),
        *("table", "watch", "weights"),
    )

    def __init__(self, order: Order | None = None, watch: Watch | None = None) -> None:
        # Ranks create their layers in the same order, whatever order they first run them in.
        self.order = new_order() if order is None else order
        self.table: dict[tuple[object, ...], Any] = {}
        self.agreement = Agreement()
        self.last: tuple[tuple[object, ...], Any] | None = None
        self.memo: Memo | None = None
        self.recipe: type[Recipe] | None = None
        self.states: dict[object, LayerStates] = {}
        self.weights = WeightStore()
        self.watch = watch
        self._unwatched: tuple[Any, Any] = ({}, None)
        # How many non-finite elements the layer's casts have met, by device; see nonfinite_of.
        self.nonfinite: dict[torch.device, torch.Tensor] = {}

    def fresh(self) -> Bindings:
        """Return one without links, under the same watch and with the same counters."""
        empty = Bindings(self.order, self.watch)
        empty.nonfinite = self.nonfinite
        return empty

    def nonfinite_of(self, device: torch.device, *, is_training: bool) -> torch.Tensor | None:
        """Return the int64 ``[1]`` in which the layer's casts on ``device`` count NaN and inf.

        It is entry 0 of the stored counter for calls that record gradients (``is_training``), and
        entry 1 for the others: an evaluation between two steps is no part of a step. None on meta.
        Called where a layer is bound, see :func:`fp8core.torch_ops.capture.in_plain_mode`.
        """
        if device.type == "meta":
            return None
        if device not in self.nonfinite:
            self.nonfinite[device] = new_counter(device)
        return self.nonfinite[device].narrow(0, 0 if is_training else 1, 1)

    def set_watch(self, watch: Watch | None) -> None:
        """Have the layer bind its links for ``watch``; None restores the links without one."""
        if watch is self.watch:
            return
        if self.watch is None:
            self._unwatched = (self.table, self.last)
        self.table, self.last = ({}, None) if watch is not None else self._unwatched
        self.watch = watch

    def __reduce__(self) -> tuple[type[Bindings], tuple[()]]:
        return Bindings, ()

    def __deepcopy__(self, memo: object) -> Bindings:
        return Bindings(new_order(self.order))
