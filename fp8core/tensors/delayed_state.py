"""The state of delayed scaling of one direction of one layer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import ScaleUpdateDesc
from fp8core.collectives import Communicator
from fp8core.collectives.base import GroupReference
from fp8core.dispatch import table
from fp8core.recipe.plan import DelayedPlan

Order: TypeAlias = "tuple[int, ...]"
"""A layer's number in the order of creation, ``(n,)``; of a copy ``(n, m)``: it is the m-th copy of
layer n, as a copy on one rank alone must not change the numbers of layers that all ranks create."""

Family: TypeAlias = "tuple[int, ...]"
"""Layers that are numbered together: ``()`` for those created, ``(n,)`` for copies of layer n."""

_created: Counter[Family] = Counter()
_lock = threading.Lock()


def new_order(original: Order | None = None) -> Order:
    """Return the number of a layer that is created now, or copied from ``original``.

    A copy of a copy is one more of the layer that was created.
    """
    family = () if original is None else original[:1]
    with _lock:
        number = _created[family]
        _created[family] = number + 1
    return (*family, number)


def family_of(order: Order) -> Family:
    """Return the family of a layer."""
    return order[:-1]


def num_created() -> Counter[Family]:
    """Return how many layers of each family there were so far, whether they still exist or not."""
    with _lock:
        return _created.copy()


def shown(order: Order) -> str:
    """Return the number in words."""
    number = f"layer {order[0]} of its process"
    return number if len(order) == 1 else f"copy {order[1]} of {number}"


class DelayedState:
    """Scale and amax history of one direction of one layer, in the layer's buffers.

    ``scale [slots]`` and ``amax_history [length, slots]`` are float32 and updated in place; row 0
    of the history holds the amax since the last update, rows 1 to length - 1 older ones, the
    oldest first. ``fp8_max [slots]`` is the largest value of each slot's format, ``nonfinite [1]``
    int64 counts the amaxes that were not recorded because they were inf. ``order`` is the
    layer's number, see :mod:`fp8core.tensors.delayed_state`.
    """

    def __init__(
        self,
        owner: str,
        plan: DelayedPlan,
        recipe: Any,
        *,
        scale: torch.Tensor,
        amax_history: torch.Tensor,
        maxima: Sequence[float],
        order: Order,
    ) -> None:
        self.owner = owner
        self.plan = plan
        self.recipe = recipe
        self.scale = scale
        self.amax_history = amax_history
        # States with the same buffers have the same key, as long as one of them is alive.
        self.key = id(amax_history)
        self.fp8_max = torch.tensor(maxima, dtype=torch.float32, device=scale.device)
        self.targets = self.fp8_max * 2.0**-plan.margin
        self.nonfinite = torch.zeros(1, dtype=torch.int64, device=scale.device)
        # The backend's update, bound like every other operation; None for the user's own functions.
        self.advance: Callable[..., None] | None = None
        self.prepare: Callable[..., Callable[[], None]] | None = None
        desc = update_desc(plan)
        if desc is not None:
            resolved = table.resolve(desc, scale.device)
            self.advance, self.prepare = resolved.run, resolved.offers.prepare
        self.group: GroupReference | None = None
        # The ranks over which the layer is spread: they exchange codes, and need equal scales.
        self.communicator: Communicator | None = None
        self.order = order
        # Whether a backward pass that recorded here has failed. Its amaxes are discarded at once,
        # but on the stream of the engine's thread, and a kernel on another stream may still record.
        # So they are discarded again where the next pass begins to record.
        self.is_abandoned = False
        # The batch of states that was last updated together, if this state is its first member.
        self.batch: Any = None

    @property
    def reduced_over(self) -> GroupReference | None:
        """The group over which the amaxes are reduced, besides the layer's ranks."""
        return self.group if self.plan.reduce_amax else None


def update_desc(plan: DelayedPlan | None) -> ScaleUpdateDesc | None:
    """Return the update of delayed scales, without a ``plan`` that of the defaults; None where the
    user's own functions do it."""
    if plan is None:
        return ScaleUpdateDesc("max")
    if isinstance(plan.amax_algorithm, str) and plan.scaling_algorithm is None:
        return ScaleUpdateDesc(plan.amax_algorithm)
    return None
