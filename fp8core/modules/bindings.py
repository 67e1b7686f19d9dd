"""The bound links of a layer, by recipe, device, dtype and policy, and the state they share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fp8core.chain.shape import Watch
from fp8core.context.autocast import Active
from fp8core.dispatch.policy import Policy
from fp8core.modules.agreement import Agreement
from fp8core.recipe import Recipe
from fp8core.tensors.delayed_state import DelayedState, LayerStates, Order, new_order
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops.counted import new_counter
from fp8core.torch_ops.likeness import Likeness

__all__ = ["Bindings", "Repeat", "bind_lock"]

bind_lock = threading.RLock()
"""Held while a layer is bound: two threads that use it for the first time must not each create its
delayed state."""


class Repeat(NamedTuple):
    """The last dense call of a layer, and how it ran.

    Attributes:
        arguments: the call's arguments besides the tensors that it computes from.
        is_like: whether the input and the parameters of another call are like its own.
        address: the address of a parameter's memory, 0 if it was freed.
        run: computes the output from the input and the parameters; None where it cannot.
        num_params: how many parameters there were.
        asked: the active request, and the backends that the program named.
        mode: whether gradients were enabled, and whether the layer was training.
        states: the forward and the backward state in which it recorded, None if in none.
        scope: the weights of the scope of frozen weights that was open, None if none was.
    """

    arguments: tuple[object, ...]
    is_like: Likeness
    address: Callable[[torch.Tensor], int]
    run: Callable[..., torch.Tensor | None]
    num_params: int
    asked: tuple[Active, Policy]
    mode: tuple[bool, bool]
    states: tuple[DelayedState, DelayedState] | None
    scope: object


class Bindings:
    """A layer's bound links by key, and the delayed states, weights and counters they use.

    A copy of the layer starts with an empty one, as everything here refers to the tensors of one
    layer. ``table`` and ``last`` hold the links bound for ``watch``, which is None in most
    layers. Those bound without a watch are set aside while there is one, and run again afterwards.
    ``agreement`` is what the ranks have compared, of a layer over ranks.
    ``repeat`` is the last call if it ran the links of ``last`` and may be repeated. ``recipe`` is
    the class of the last recipe in low precision.
    """

    __slots__ = (
        *(
            "_last",
            "_unwatched",
            "agreement",
            "nonfinite",
            "order",
            "recipe",
            "repeat",
            "states",
            "table",
        ),
        *("watch", "weights"),
    )

    def __init__(self, order: Order | None = None, watch: Watch | None = None) -> None:
        # Ranks create their layers in the same order, whatever order they first run them in.
        self.order = new_order() if order is None else order
        self.table: dict[tuple[object, ...], Any] = {}
        self.agreement = Agreement()
        self._last: tuple[tuple[object, ...], Any] | None = None
        self.repeat: Repeat | None = None
        self.recipe: type[Recipe] | None = None
        self.states: dict[object, LayerStates] = {}
        self.weights = WeightStore()
        self.watch = watch
        self._unwatched: tuple[Any, Any] = ({}, None)
        # How many non-finite elements the layer's casts have met, by device; see nonfinite_of.
        self.nonfinite: dict[torch.device, torch.Tensor] = {}

    @property
    def last(self) -> tuple[tuple[object, ...], Any] | None:
        """The key and the links of the last call."""
        return self._last

    @last.setter
    def last(self, last: tuple[tuple[object, ...], Any] | None) -> None:
        self._last = last
        self.repeat = None

    def fresh(self) -> Bindings:
        """Return one without links, under the same watch and with the same counters."""
        empty = Bindings(self.order, self.watch)
        empty.nonfinite = self.nonfinite
        return empty

    def nonfinite_of(self, device: torch.device, *, is_training: bool) -> torch.Tensor | None:
        """Return the int64 ``[1]`` in which the layer's casts on ``device`` count NaN and inf.

        It is entry 0 of the stored counter for calls that record gradients (``is_training``), and
        entry 1 for the others: an evaluation between two steps is no part of a step. None on meta.
        Called where a layer is bound, see :func:`fp8core.torch_ops.lasting.lasting`.
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
